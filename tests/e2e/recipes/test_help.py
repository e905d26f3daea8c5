"""Every recipe explains itself, and refuses what it cannot do before it begins."""

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
"""All in one process: most of the time goes into importing torch."""
TRY = """
try:
    dpo.main()
except SystemExit as end:
    print(end.code)
"""


@dataclass(frozen=True)
class Shown:
    """What a recipe printed."""

    name: str
    text: str

    @property
    def fields(self) -> list[str]:
        """Names of the fields of its setting."""
        tree = ast.parse((ROOT / 'examples' / 'cookbook' / f'{self.name}.py').read_text())
        (setting,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == 'Setting']
        found = [node.target for node in setting.body if isinstance(node, ast.AnnAssign)]
        return [target.id for target in found if isinstance(target, ast.Name)]


def test_help_tells_every_option() -> None:
    """`--help` ends well, begins with what the recipe teaches, and has an option for each field of the setting."""
    done = subprocess.run([sys.executable, '-c', SHOW, *NAMES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split('RECIPE ')[1:]
    shown = [Shown(*part.split('\n', 1)) for part in parts]
    assert [one.name for one in shown] == NAMES
    for one in shown:
        assert 'STATUS 0' in one.text
        assert f'python -m examples.cookbook.{one.name}' in one.text
        options = {'setting', 'seed', 'out', *(field.replace('_', '-') for field in one.fields)}
        assert {option for option in options if f'--{option} ' not in one.text} == set()


def test_wrong_options_are_refused_by_name(tmp_path: Path) -> None:
    """A number below zero, a choice that is none and a folder that cannot be: each ends the program at once."""
    (tmp_path / 'file').touch()
    wrong = {
        '--steps': '-3',
        '--beta': 'nan',
        '--seed': '-1',
        '--loss-type': 'simpo',
        '--precision': 'fp16',
        '--out': str(tmp_path / 'file' / 'out'),
    }
    begin = 'import sys\nfrom examples.cookbook import dpo\n'
    each = [f'sys.argv = ["dpo", {option!r}, {value!r}]\n{TRY}' for option, value in wrong.items()]
    command = [sys.executable, '-c', begin + ''.join(each)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ['2'] * len(wrong)
    for option in wrong:
        assert f'error: argument {option}: ' in done.stderr
