"""Servicers are thin, and tests neither sleep nor patch."""

import ast

from fixtures.source_tree import body_lines, functions, imported_names, modules

SERVICER_LINES = 8
"""Most lines of an RPC method: convert, delegate, convert back."""
ENVIRONMENT = {'chdir', 'delenv', 'setenv', 'syspath_prepend'}
"""Methods of pytest's monkeypatch that tests may use: they change the environment and no code."""


def test_servicers_convert_delegate_and_convert() -> None:
    """No RPC method has more than 8 lines of body or catches an error."""
    offenders: list[str] = []
    for module in modules('services/'):
        if 'servicer' not in module.name.rsplit('.', maxsplit=1)[-1]:
            continue
        for name, function in functions(module):
            # An RPC method has the contract's name, so it begins with a capital.
            if function.name[0].isupper() and (
                body_lines(function) > SERVICER_LINES or any(isinstance(node, ast.Try) for node in ast.walk(function))
            ):
                offenders.append(f'{module.path}: {name}, {body_lines(function)} lines')
    assert offenders == []


def test_tests_do_not_sleep() -> None:
    """Tests wait for conditions and do not sleep; `asyncio.sleep(0)` only yields to the loop."""
    offenders = [
        f'{module.path}:{node.lineno}'
        for module in modules('tests/')
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {'time.sleep', 'asyncio.sleep', 'sleep'}
        and not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)
    ]
    assert offenders == []


def test_tests_do_not_patch() -> None:
    """Tests pass fakes to constructors, and use no mocks and no attribute patches."""
    offenders = [
        f'{module.path}:{line}'
        for module in modules('tests/')
        for line in [*_mock_imports(module.tree), *_attribute_patches(module.tree)]
    ]
    assert offenders == []


def _mock_imports(tree: ast.Module) -> list[int]:
    return [line for line, name in imported_names(tree) if 'mock' in name.split('.')]


def _attribute_patches(tree: ast.Module) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == 'monkeypatch' and node.attr not in ENVIRONMENT
    ]
