"""Services are made of modules that hold one resource or idea, and names that mean one thing."""

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
"""Largest share of a service's modules that may be shorter than `SMALL_LINES`: a module holds more than one verb."""
BAGS = re.compile(r'\w+(World|Needs|Verbs|Parts)')
"""Names of classes that only pass parameters between constructors."""
GATEWAY_FILES = 150
GATEWAY_LINES = 22_500
"""Size of the gateway, generated code excluded. Both only shrink."""


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
    """No class is named as a bag of dependencies: constructors take what they use."""
    offenders = [
        f'{module.path}: {node.name}'
        for module in modules(f'services/{service}/')
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and BAGS.fullmatch(node.name)
    ]
    assert offenders == []


@pytest.mark.parametrize('service', SERVICES)
def test_a_class_name_means_one_thing(service: str) -> None:
    """No public class name is defined twice within a service."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules(f'services/{service}/'):
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
                places[node.name].append(module.path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_the_gateway_stays_small() -> None:
    """The gateway has no more files and lines than its budget."""
    paths = modules('services/gateway/')
    assert len(paths) <= GATEWAY_FILES
    assert sum(len(module.text.splitlines()) for module in paths) <= GATEWAY_LINES


def test_modules_do_not_import_each_other_in_circles() -> None:
    """No module imports itself through others, imports for type checking included."""
    graph = grimp.build_graph(
        'twinkle', 'twinkle_client', 'services', exclude_type_checking_imports=False, cache_dir=None
    )
    cycles = _cycles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    assert cycles == []


def _cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the modules that are left once modules without imports among the rest have been removed repeatedly."""
    left = dict(imports)
    while free := [module for module, found in left.items() if not found & left.keys()]:
        for module in free:
            del left[module]
    return [sorted(left)] if left else []
