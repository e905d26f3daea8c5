"""The command lines of the recipes: `--help`, and the rejection of invalid options, without loading torch."""

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / 'examples' / 'cookbook'
RUN = """
import json, runpy, sys
for name, *arguments in json.loads(sys.argv[1]):
    sys.argv = [name, *arguments]
    print('RUN', flush=True)
    print('RUN', file=sys.stderr, flush=True)
    try:
        runpy.run_module(f'examples.cookbook.{name}', run_name='__main__', alter_sys=True)
    except SystemExit as end:
        print('STATUS', end.code)
    slow = {'torch', 'transformers', 'matplotlib', 'datasets', 'pyarrow'} & set(sys.modules)
    print('LOADED', *slow)
"""
"""Program that runs several command lines, and prints the status and the slow libraries that were loaded."""
INVALID = {
    'int': ('0', '-3', 'x'),
    'float': ('-0.5', 'nan', 'inf'),
    'Literal': ('simpo',),
    'model': ('no model', './x'),
}
"""Invalid values by the type of the option, and for names of models."""


@dataclass(frozen=True)
class Recipe:
    """A recipe and the fields of its setting."""

    name: str

    @cached_property
    def fields(self) -> dict[str, ast.AnnAssign]:
        """Fields of the recipe's `Setting` by name."""
        tree = ast.parse((FOLDER / f'{self.name}.py').read_text())
        (setting,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == 'Setting']
        found = [node for node in setting.body if isinstance(node, ast.AnnAssign)]
        return {node.target.id: node for node in found if isinstance(node.target, ast.Name)}

    def invalid_calls(self) -> list[tuple[str, str, str]]:
        """Return command lines with one invalid option each."""
        calls = [(self.name, '--seed', '-1'), (self.name, '--track', 'jsonl,wandbb'), (self.name, '--setting', 'tpu')]
        for name, field in self.fields.items():
            kind = 'model' if name in {'model', 'teacher'} else ast.unparse(field.annotation).partition('[')[0]
            may_be_zero = field.value is not None and "'minimum': 0" in ast.unparse(field.value)
            values = [value for value in INVALID.get(kind, ()) if not (may_be_zero and value == '0')]
            calls += [(self.name, '--' + name.replace('_', '-'), value) for value in values]
        return calls


RECIPES = sorted(
    (Recipe(path.stem) for path in FOLDER.glob('*.py') if path.stem != 'recipe' and 'run_recipe(' in path.read_text()),
    key=lambda recipe: recipe.name,
)


def run(calls: list[tuple[str, ...]]) -> list[tuple[str, str]]:
    """Run command lines in one process, and return the standard output and the standard error of each."""
    command = [sys.executable, '-c', RUN, json.dumps(calls)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed, errors = (text.split('RUN\n')[1:] for text in (done.stdout, done.stderr))
    return list(zip(printed, errors, strict=True))


def test_help_lists_every_option() -> None:
    """`--help` exits with status 0, lists an option for each field of the setting, and loads no slow library."""
    for recipe, (text, _) in zip(RECIPES, run([(recipe.name, '--help') for recipe in RECIPES]), strict=True):
        assert text.endswith('STATUS 0\nLOADED\n')
        assert f'python -m examples.cookbook.{recipe.name}' in text
        options = {'setting', 'seed', 'out', 'track', *(name.replace('_', '-') for name in recipe.fields)}
        assert {option for option in options if f'--{option} ' not in text} == set()


def test_invalid_options_are_rejected_by_name() -> None:
    """A recipe with an invalid option exits with status 2 before it loads a slow library, and names the option."""
    calls: list[tuple[str, ...]] = [call for recipe in RECIPES for call in recipe.invalid_calls()]
    assert len(calls) > 10 * len(RECIPES)
    for (name, option, value), (text, error) in zip(calls, run(calls), strict=True):
        assert text == 'STATUS 2\nLOADED\n', (name, option, value)
        assert f'error: argument {option}: ' in error


def test_output_folder_below_a_file_is_rejected(tmp_path: Path) -> None:
    """An output folder that cannot be created is refused by the option's name."""
    (tmp_path / 'file').touch()
    ((text, error),) = run([('dpo', '--out', str(tmp_path / 'file' / 'out'))])
    assert text == 'STATUS 2\nLOADED\n'
    assert 'error: argument --out: ' in error


def test_other_programs_read_their_options_first(tmp_path: Path) -> None:
    """The program that plots several seeds refuses invalid options before it loads matplotlib."""
    curve = tmp_path / 'ppo_seed0.jsonl'
    curve.write_text('{"step": 0, "loss": 1.0}\n')
    unknown = ('draw_seeds', str(curve), '--names', 'reward', '--out', str(tmp_path / 'plot.png'))
    (shown, _), (refused, error) = run([('draw_seeds', '--help'), unknown])
    assert shown.endswith('STATUS 0\nLOADED\n')
    assert refused == 'STATUS 2\nLOADED\n'
    assert '--names: no curve has' in error
