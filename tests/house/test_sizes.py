"""Functions and files stay small; exceptions are in one list to which no entries may be added."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from fixtures.source_tree import ROOT, Module, body_lines, functions, modules, tracked_files

LIMITS = {'lines': 40, 'parameters': 6, 'nesting': 3}
"""Limits of a function: lines of the body, parameters, and depth of nested blocks."""
FILE_LINES = 400
PROTO_LINES = 300
EXCEPTIONS = tomllib.loads((Path(__file__).parent / 'exceptions.toml').read_text())

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match)
"""Blocks that add a condition or a loop; `with` does not count."""


def test_functions_stay_small() -> None:
    """No function exceeds the limits, except the listed functions, whose sizes equal the listed sizes."""
    allowed = {
        (entry['path'], entry['name'], kind): entry[kind]
        for entry in EXCEPTIONS.get('function', [])
        for kind in LIMITS
        if kind in entry
    }
    actual = {(m.path, name, kind): size for m in modules() for name, kind, size in _oversized(m)}
    assert actual == allowed


def test_files_stay_small() -> None:
    """No source file exceeds its limit, except the listed files, whose lengths equal the listed lengths."""
    allowed = {entry['path']: entry['lines'] for entry in EXCEPTIONS.get('file', [])}
    actual = {path: lines for path, lines, limit in _file_lengths() if lines > limit}
    assert actual == allowed


def test_every_exception_has_a_reason() -> None:
    """Every exception from the limits states a reason."""
    entries = [*EXCEPTIONS.get('file', []), *EXCEPTIONS.get('function', [])]
    assert [entry for entry in entries if not entry.get('reason', '').strip()] == []


def _oversized(module: Module) -> Iterator[tuple[str, str, int]]:
    for name, function in functions(module):
        sizes = {'lines': body_lines(function), 'parameters': _parameters(function), 'nesting': _nesting(function)}
        for kind, limit in LIMITS.items():
            if sizes[kind] > limit:
                yield name, kind, sizes[kind]


def _parameters(function: Function) -> int:
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([argument for argument in parameters if argument.arg not in {'self', 'cls'}])


def _nesting(node: ast.AST) -> int:
    depths = [0]
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue
        # An `elif` is the only statement in the `orelse` of an `if`. It adds no level, because it is not indented.
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        depths.append(_nesting(child) + (isinstance(child, BLOCKS) and not is_elif))
    return max(depths)


def _file_lengths() -> Iterator[tuple[str, int, int]]:
    limits = {'.py': FILE_LINES, '.sh': FILE_LINES, '.ts': FILE_LINES, '.proto': PROTO_LINES}
    edited = {module.path for module in modules()}
    for path in tracked_files():
        suffix = Path(path).suffix
        if path in edited or (suffix in limits and suffix != '.py' and '/third_party/' not in path):
            yield path, len((ROOT / path).read_text().splitlines()), limits[suffix]
