"""The table of requirements covers every method of every contract."""

import importlib
import pkgutil

from google.protobuf.descriptor import FileDescriptor

import twinkle.api
from twinkle_services.gateway.credentials import (
    METHODS,
    SERVICES,
    Access,
    Scope,
    requirement_of,
)
from twinkle_services.gateway.forwarding.open import FORWARDED


def contract_methods() -> dict[str, str]:
    """Return every method of every contract with its service."""
    found: dict[str, str] = {}
    for module in pkgutil.walk_packages(twinkle.api.__path__, 'twinkle.api.'):
        if module.name.endswith('_pb2'):
            descriptor: FileDescriptor = importlib.import_module(module.name).DESCRIPTOR
            for service in descriptor.services_by_name.values():
                found.update({f'{service.full_name}/{method.name}': service.full_name for method in service.methods})
    return found


def test_every_method_of_every_contract_has_an_entry() -> None:
    """The table has exactly the services of the contracts, and every method that it names exists."""
    methods = contract_methods()
    assert set(SERVICES) == set(methods.values())
    assert set(METHODS) <= set(methods)


def test_exactly_the_listed_methods_are_internal() -> None:
    """Exactly the listed methods of the contracts have the requirement INTERNAL."""
    internal = {method for method in contract_methods() if requirement_of(method) is Access.INTERNAL}
    assert internal == {
        'twinkle.api.checkpoint.v1.CheckpointService/CopyCheckpoint',
        'twinkle.api.checkpoint.v1.CheckpointService/SetCheckpointVisibility',
        'twinkle.api.checkpoint.v1.CheckpointService/WatchCheckpoints',
        'twinkle.api.checkpoint.v1.VersionService/DeleteVersions',
        'twinkle.api.checkpoint.v1.WeightStreamService/Fetch',
        'twinkle.api.checkpoint.v1.WeightStreamService/Publish',
        'twinkle.api.checkpoint.v1.WeightStreamService/Subscribe',
        'twinkle.api.data.v1.DatasetService/GetStoredBytes',
        'twinkle.api.gateway.v1.FleetService/Lease',
        'twinkle.api.gateway.v1.FleetService/Register',
        'twinkle.api.model.v1.AdapterService/ParkAdapter',
        'twinkle.api.model.v1.AdapterService/WatchAdapters',
    }


def test_managing_keys_and_engines_needs_its_own_scope() -> None:
    """Creating keys needs the scope `admin`, pausing an engine needs `operator`, and unknown methods have no entry."""
    assert requirement_of('twinkle.api.gateway.v1.KeyService/CreateKey') is Scope.ADMIN
    assert requirement_of('twinkle.api.sampler.v1.SamplerService/Pause') is Scope.OPERATOR
    assert requirement_of('twinkle.api.unknown.v1.Service/Method') is None


def test_every_forwarded_contract_is_in_the_table() -> None:
    """All forwarded contracts are services in the table."""
    names = {descriptor.full_name for descriptors in FORWARDED.values() for descriptor in descriptors}
    assert names <= set(SERVICES)
