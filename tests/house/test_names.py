"""Packages list their names, modules have docstrings, and no package has a meaningless name."""

import ast
import importlib.util
from pathlib import Path

import pytest

from fixtures.source_tree import modules, tracked_files

FORBIDDEN_NAMES = {'utils', 'util', 'helpers', 'helper', 'common', 'misc'}
"""Names that do not describe their contents."""
TYPED_BY_USERS = {'sdk/python/twinkle/server/common.py', 'sdk/python/twinkle/server/tinker/common.py'}
"""Modules with a forbidden name that user programs import; they only re-export names of other modules."""
TORCH_PACKAGES = ('loss', 'metric', 'model', 'module', 'nn', 'processor', 'sampler')
"""Packages of the library that load torch; they are not imported, so only the presence of `__all__` is checked."""
PACKAGES = [module for module in modules('sdk/python/', 'services/') if module.is_package]
LIGHT_PACKAGES = [
    module.name
    for module in PACKAGES
    if '.backends' not in module.name
    and not module.name.startswith(tuple(f'twinkle.{package}' for package in TORCH_PACKAGES))
]


def test_no_file_has_a_meaningless_name() -> None:
    """No file, folder or contract is named utils, helpers, common or misc."""
    offenders = [
        path
        for path in sorted({*tracked_files()} - TYPED_BY_USERS)
        if FORBIDDEN_NAMES & {Path(part).stem.lower() for part in Path(path).parts}
    ]
    assert offenders == []


def test_every_module_has_a_docstring() -> None:
    """Every module has a docstring of 1 to 10 lines."""
    lengths = {m.path: len((ast.get_docstring(m.tree) or '').splitlines()) for m in modules()}
    assert {path: lines for path, lines in lengths.items() if not 1 <= lines <= 10} == {}


def test_every_public_package_lists_its_names() -> None:
    """Every package of the SDK and the services defines `__all__`."""
    assert [module.path for module in PACKAGES if not _assigns_all(module.tree)] == []


@pytest.mark.parametrize('package', LIGHT_PACKAGES)
def test_listed_names_resolve(package: str) -> None:
    """Every name in the `__all__` of a package without torch is importable and listed once."""
    module = importlib.import_module(package)
    names = list(module.__all__)
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(module, name) and not _is_submodule(package, name)] == []


def _assigns_all(tree: ast.Module) -> bool:
    targets: list[ast.expr] = []
    for node in tree.body:
        targets += node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id == '__all__' for target in targets)


def _is_submodule(package: str, name: str) -> bool:
    return importlib.util.find_spec(f'{package}.{name}') is not None
