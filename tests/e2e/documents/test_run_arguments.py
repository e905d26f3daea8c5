"""Arguments of `./run`: every command describes them, and refuses wrong ones with an error that names the argument."""

import re
import subprocess
from pathlib import Path

import pytest

from fixtures.documented import Checkout
from fixtures.source_tree import ROOT

LISTED = re.compile(r'^    (quickstart \| [a-z0-9 |-]+)\) ;;$', re.MULTILINE)
COMMANDS = LISTED.findall((ROOT / 'run').read_text())[0].split(' | ')
"""All commands except `help`."""
OTHER_PROGRAMS = {'quickstart': 'python -m examples.quickstart', 'bench': 'python -m benchmarks', 'gen': 'generate.py'}
"""Names that commands have in the help of their programs."""
HAS_OTHER_HELP = {'dev': 'twinkle up', 'twinkle': 'twinkle', 'types': 'pyright'}
WRONG = [
    (['fuzz', '0'], "argument N must be a whole number from 1, got '0'"),
    (['fuzz', '-1'], "argument N must be a whole number from 1, got '-1'"),
    (['fuzz', '1.5', '-x'], "argument N must be a whole number from 1, got '1.5'"),
    (['fuzz', ''], "argument N must be a whole number from 1, got ''"),
    (['fuzz', 'ten'], "argument N must be a whole number from 1, got 'ten'"),
    (['test', '--all', 'tests/unit'], "unexpected argument 'tests/unit' after --all"),
    *[
        ([command, '--fast'], f"{command}: unexpected argument '--fast'; the command has no arguments")
        for command in ('second', 'check', 'console', 'fmt', 'lint', 'release-protos')
    ],
    (['faults', '0'], "argument count: must be a whole number from 1, got '0'"),
    (['faults', 'many'], "argument count: must be a whole number from 1, got 'many'"),
    (['faults', '--seed', '-1'], 'argument --seed: '),
    (['faults', '--at-once', '0'], "argument --at-once: must be a whole number from 1, got '0'"),
    (['cookbook', '--limit', 'x'], "argument --limit: must be a finite number above 0, got 'x'"),
    (['cookbook', 'x'], 'argument RECIPE: unknown recipes: x'),
    (['bench', 'x'], 'unknown benchmark x'),
    (['quickstart', '--steps', '1'], 'argument --steps: must be at least 2'),
    (['gen', 'x'], 'unrecognized arguments: x'),
    (['checks'], "unknown command 'checks'"),
]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `./run` in a copy of the repository whose environment stays as it is."""
    checkout = Checkout(folder)
    (folder / 'tests').symlink_to(ROOT / 'tests')
    return subprocess.run(
        ['./run', *words], cwd=folder, env=checkout.variables(), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize('command', COMMANDS)
def test_every_command_has_help(tmp_path: Path, command: str) -> None:
    """A command with `--help` describes its arguments, does nothing else, and succeeds."""
    found = run(tmp_path, command, '--help')
    assert found.returncode == 0, found.stderr
    program = {**OTHER_PROGRAMS, **HAS_OTHER_HELP}.get(command, f'./run {command}')
    assert re.match(rf'usage: {re.escape(program)}\b', found.stdout.strip(), re.IGNORECASE)
    assert len(found.stdout.splitlines()) > 2


@pytest.mark.parametrize(('words', 'problem'), WRONG)
def test_wrong_arguments_are_refused(tmp_path: Path, words: list[str], problem: str) -> None:
    """A wrong argument ends the command with a sentence that names the argument, before anything else."""
    found = run(tmp_path, *words)
    assert found.returncode in {1, 2}
    assert problem in found.stderr
