"""Every recipe of the cookbook follows the conventions of its README."""

import ast
from pathlib import Path

import pytest

from fixtures.source_tree import ROOT, Module, modules

FOLDER = 'examples/cookbook/'
RECIPES = {
    Path(module.path).stem: module
    for module in modules(FOLDER)
    if not module.path.endswith('/recipe.py') and 'run_recipe(' in module.text
}


def settings_of(module: Module) -> dict[str, str]:
    """Return the class of each setting that is defined at the top level of a module."""
    return {
        target.id: node.value.func.id
        for node in module.tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in {'CPU', 'GPU'}
    }


def test_the_recipes_are_found() -> None:
    """The rule that distinguishes recipes from shared modules finds known recipes."""
    assert {'four_tenants', 'pretraining', 'sft_self_cognition'} <= set(RECIPES)


@pytest.mark.parametrize('name', RECIPES)
def test_a_recipe_has_both_settings(name: str) -> None:
    """A recipe has a CPU and a GPU setting of the same class, and a docstring for `--help`."""
    assert settings_of(RECIPES[name]) == {'CPU': 'Setting', 'GPU': 'Setting'}
    assert ast.get_docstring(RECIPES[name].tree)


@pytest.mark.parametrize('name', RECIPES)
def test_a_recipe_is_tested_and_documented(name: str) -> None:
    """A recipe has a test module with its name, and a line in the README."""
    assert (ROOT / 'tests' / 'e2e' / 'recipes' / f'test_{name}.py').is_file()
    assert f'| [{name}]({name}.py) |' in (ROOT / FOLDER / 'README.md').read_text()
