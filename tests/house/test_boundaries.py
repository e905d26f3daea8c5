"""Only boundaries catch all exceptions, services connect in one place, and no file contains a machine's path."""

import ast
import re

from fixtures.source_tree import ROOT, modules, tracked_files

BLIND_ALLOWED = re.compile(r'^(services/kit/rpc/|services/[a-z]+/backends/)')
"""Modules that may convert unknown errors to domain errors: the RPC code, and the backends that call libraries."""
MACHINE_PATHS = re.compile(r'(?<![\w.])/(?:work|root|home/\w+|opt/pypi|opt/wheels)/')
"""Absolute paths that exist on one machine only."""


def test_only_boundaries_catch_everything() -> None:
    """Outside kit/rpc and backends, code that catches all exceptions raises them again after cleaning up."""
    offenders = [
        f'{module.path}:{node.lineno}'
        for module in modules('services/', 'sdk/')
        if not BLIND_ALLOWED.match(module.path)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler) and _catches_everything(node) and not _raises_again(node)
    ]
    assert offenders == []


def test_services_connect_and_listen_in_one_place() -> None:
    """Channels and ports are created only in the two modules that configure TLS."""
    constructors = {'insecure_channel', 'secure_channel', 'add_insecure_port', 'add_secure_port'}
    paths = {
        module.path
        for module in modules('services/')
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in constructors
    }
    assert paths == {'services/kit/rpc/channel.py', 'services/kit/rpc/service_ports.py'}


def test_no_file_contains_a_path_of_one_machine() -> None:
    """No tracked text contains a home folder, a working folder or a local package mirror."""
    offenders: list[str] = []
    for path in tracked_files():
        content = (ROOT / path).read_bytes()
        if b'\0' not in content and path != 'tests/house/test_boundaries.py':
            offenders += [f'{path}: {found}' for found in MACHINE_PATHS.findall(content.decode())]
    assert offenders == []


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in {'Exception', 'BaseException'} for kind in kinds)


def _raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None
