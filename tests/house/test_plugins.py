"""Services that build components by name disable plugins that their operator did not list."""

import ast

import pytest

from fixtures.source_tree import ROOT


@pytest.mark.parametrize('program', ['data/__main__.py', 'model/__main__.py', 'model/replay.py', 'sampler/__main__.py'])
def test_service_disables_plugins_first(program: str) -> None:
    """A service disables plugins before it reads its configuration or starts child processes."""
    tree = ast.parse((ROOT / 'services' / program).read_text())
    (main,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == 'main']
    first = next(node for node in main.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
    assert ast.unparse(first) == 'keep_plugins_out()'
    assert main.body.index(first) == 1, 'statements other than the docstring precede it'
