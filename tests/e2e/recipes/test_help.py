"""The command lines of the recipes: `--help`, and the rejection of invalid options."""

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).resolve().parents[3]
NAMES = sorted(
    path.stem
    for path in (ROOT / 'examples' / 'cookbook').glob('*.py')
    if path.stem != 'recipe' and 'run_recipe(' in path.read_text()
)
SHOW = """
import importlib, sys
for name in sys.argv[1:]:
    print('RECIPE', name)
    sys.argv = [name, '--help']
    try:
        importlib.import_module(f'examples.cookbook.{name}').main()
    except SystemExit as end:
        print('STATUS', end.code)
"""
"""Program that prints the help of all recipes. One process suffices, and importing torch takes most of its time."""
CALL_MAIN = """
try:
    dpo.main()
except SystemExit as end:
    print(end.code)
"""
"""Part of a program that runs the DPO recipe and prints its exit status."""


@dataclass(frozen=True)
class Help:
    """Help text that a recipe has printed."""

    name: str
    text: str

    @property
    def fields(self) -> list[str]:
        """Names of the fields of the recipe's `Setting`."""
        tree = ast.parse((ROOT / 'examples' / 'cookbook' / f'{self.name}.py').read_text())
        (setting,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == 'Setting']
        found = [node.target for node in setting.body if isinstance(node, ast.AnnAssign)]
        return [target.id for target in found if isinstance(target, ast.Name)]


def test_help_lists_every_option() -> None:
    """`--help` exits with status 0 and lists an option for each field of the setting."""
    done = subprocess.run([sys.executable, '-c', SHOW, *NAMES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split('RECIPE ')[1:]
    printed = [Help(*part.split('\n', 1)) for part in parts]
    assert [recipe.name for recipe in printed] == NAMES
    for recipe in printed:
        assert 'STATUS 0' in recipe.text
        assert f'python -m examples.cookbook.{recipe.name}' in recipe.text
        options = {'setting', 'seed', 'out', 'track', *(field.replace('_', '-') for field in recipe.fields)}
        assert {option for option in options if f'--{option} ' not in recipe.text} == set()


@pytest.mark.slow
def test_invalid_options_are_rejected_by_name(tmp_path: Path) -> None:
    """A recipe with an invalid option exits with status 2, and the error names the option."""
    (tmp_path / 'file').touch()
    invalid = {
        '--steps': '-3',
        '--beta': 'nan',
        '--seed': '-1',
        '--loss-type': 'simpo',
        '--precision': 'fp16',
        '--track': 'jsonl,wandbb',
        '--out': str(tmp_path / 'file' / 'out'),
    }
    imports = 'import sys\nfrom examples.cookbook import dpo\n'
    calls = [f'sys.argv = ["dpo", {option!r}, {value!r}]\n{CALL_MAIN}' for option, value in invalid.items()]
    command = [sys.executable, '-c', imports + ''.join(calls)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ['2'] * len(invalid)
    for option in invalid:
        assert f'error: argument {option}: ' in done.stderr
