"""Servicers are thin, generators do not yield inside task groups, and tests neither sleep nor patch."""

import ast
from collections.abc import Iterator

from fixtures.source_tree import body_lines, functions, imported_names, modules

SERVICER_LINES = 8
"""Maximum number of lines of an RPC method: convert, delegate, convert back."""
ENVIRONMENT = {'chdir', 'delenv', 'setenv', 'syspath_prepend'}
"""Methods of pytest's monkeypatch that tests may use, because they change the environment and no code."""


def test_servicer_methods_are_short() -> None:
    """No RPC method has more than 8 lines of body or catches an error."""
    offenders: list[str] = []
    for module in modules('services/'):
        if 'servicer' not in module.name.rsplit('.', maxsplit=1)[-1]:
            continue
        for name, function in functions(module):
            # An RPC method has the contract's name, which begins with a capital letter.
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


def test_generators_do_not_yield_inside_a_task_group() -> None:
    """No generator yields inside a TaskGroup, which wraps the GeneratorExit of a closed generator in an ExceptionGroup.

    A function with `asynccontextmanager` may do so, because contextlib resumes it at the end of its block.
    """
    offenders = [
        f'{module.path}:{block.lineno}: {name}'
        for module in modules('services/', 'sdk/python/', 'examples/')
        for name, function in functions(module)
        if not any('contextmanager' in ast.unparse(decorator) for decorator in function.decorator_list)
        for block in _own_nodes(function)
        if isinstance(block, ast.AsyncWith) and any('TaskGroup(' in ast.unparse(item) for item in block.items)
        if any(isinstance(node, ast.Yield) for node in _own_nodes(block))
    ]
    assert offenders == []


def _own_nodes(root: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `root`, without the nodes of nested functions."""
    for child in ast.iter_child_nodes(root):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _own_nodes(child)


def _mock_imports(tree: ast.Module) -> list[int]:
    return [line for line, name in imported_names(tree) if 'mock' in name.split('.')]


def _attribute_patches(tree: ast.Module) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == 'monkeypatch' and node.attr not in ENVIRONMENT
    ]
