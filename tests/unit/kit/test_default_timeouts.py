"""Default timeouts of methods."""

from importlib import import_module, resources
from typing import Any

from google.protobuf import descriptor_pool

from twinkle_services.kit.rpc.server import default_timeouts


def test_every_default_timeout_belongs_to_a_method_of_the_contract() -> None:
    """Default timeouts exist only for methods of the contracts."""
    assert default_timeouts()
    for path in default_timeouts():
        service, method = path[1:].split('/')
        assert method in {item.name for item in _descriptor(service).methods}


def _descriptor(service: str) -> Any:
    package, _, _ = service.rpartition('.')
    folder = resources.files(package)
    for file in folder.iterdir():
        if file.name.endswith('_service_pb2.py'):
            import_module(f'{package}.{file.name.removesuffix(".py")}')
    return descriptor_pool.Default().FindServiceByName(service)
