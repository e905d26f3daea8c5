"""Structure of the services: few small modules, unique class names, a bounded gateway, and no import cycles."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import grimp
import pytest

from fixtures.source_tree import modules

SERVICES = ('checkpoint', 'data', 'gateway', 'kit', 'model', 'sampler')
SMALL_LINES = 40
SMALL_SHARE = 0.15
"""Largest share of a service's modules that may have fewer than `SMALL_LINES` lines."""
PARAMETER_CONTAINERS = re.compile(r'\w+(World|Needs|Verbs|Parts)')
"""Names of classes that only pass parameters between constructors."""
GATEWAY_FILES = 174
GATEWAY_LINES = 27_531
"""Limits for the size of the gateway, excluding generated code. Raise them only for a new feature."""


@pytest.mark.parametrize('service', SERVICES)
def test_few_modules_are_small(service: str) -> None:
    """A service has at most 15 % of its modules below 40 lines; `__init__` modules do not count."""
    lengths = {
        module.path: len(module.text.splitlines())
        for module in modules(f'services/{service}/')
        if Path(module.path).name != '__init__.py'
    }
    small = sorted(path for path, lines in lengths.items() if lines < SMALL_LINES)
    assert len(small) <= SMALL_SHARE * len(lengths), small


@pytest.mark.parametrize('service', SERVICES)
def test_no_class_only_carries_parameters(service: str) -> None:
    """No class has a name of a container for dependencies: constructors take the objects that they use."""
    offenders = [
        f'{module.path}: {node.name}'
        for module in modules(f'services/{service}/')
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and PARAMETER_CONTAINERS.fullmatch(node.name)
    ]
    assert offenders == []


@pytest.mark.parametrize('service', SERVICES)
def test_class_names_are_unique_within_a_service(service: str) -> None:
    """No public class name is defined twice within a service."""
    definitions: dict[str, list[str]] = defaultdict(list)
    for module in modules(f'services/{service}/'):
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
                definitions[node.name].append(module.path)
    assert {name: paths for name, paths in definitions.items() if len(paths) > 1} == {}


def test_the_gateway_stays_small() -> None:
    """The gateway has no more files and lines than its budget allows."""
    paths = modules('services/gateway/')
    assert len(paths) <= GATEWAY_FILES
    assert sum(len(module.text.splitlines()) for module in paths) <= GATEWAY_LINES


def test_imports_have_no_cycles() -> None:
    """No module imports itself through other modules, even if the imports are for type checking only."""
    graph = grimp.build_graph(
        'twinkle', 'twinkle_client', 'twinkle_services', exclude_type_checking_imports=False, cache_dir=None
    )
    cycles = _cycles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    assert cycles == []


def _cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the modules that remain after repeatedly removing all modules that import none of the remaining ones."""
    remaining = dict(imports)
    while removable := [module for module, found in remaining.items() if not found & remaining.keys()]:
        for module in removable:
            del remaining[module]
    return [sorted(remaining)] if remaining else []
