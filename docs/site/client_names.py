"""Finds the functions of `twinkle_client` that call each method of the contracts."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path


def callers(client_root: Path) -> dict[str, list[str]]:
    """Return the public functions and classes that call a method, by `Service/Method`.

    A module calls a method if it imports the stub of the service and reads the method as an attribute.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(client_root.rglob('*.py')):
        tree = ast.parse(path.read_text(encoding='utf-8'))
        module = '.'.join(path.relative_to(client_root.parent).with_suffix('').parts)
        for (name, function), service in product(_functions(tree), _services_of(tree)):
            for method in sorted({node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}):
                found[f'{service}/{method}'].append(f'{module}.{name}')
    return found


def _services_of(tree: ast.Module) -> list[str]:
    """Return the services of the stubs that a module imports."""
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names]
    return [name.removesuffix('Stub') for name in names if name.endswith('Stub')]


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield functions and methods, without those of private classes. A private method has the name of its class."""
    for node in tree.body:
        name = getattr(node, 'name', '_')
        if name.startswith('_'):
            continue
        if not isinstance(node, ast.ClassDef):
            yield name, node
            continue
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
        yield from ((name if item.name.startswith('_') else f'{name}.{item.name}', item) for item in methods)
