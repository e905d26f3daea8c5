"""Tests of contract rules that buf cannot check, on the generated descriptors."""

import importlib
import json
import pkgutil
from collections.abc import Iterator
from importlib import resources

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor, MethodDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions

import twinkle.api

UNSIGNED = {
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_FIXED32,
    FieldDescriptor.TYPE_FIXED64,
}
PREPOSITIONS = {
    'after',
    'at',
    'before',
    'by',
    'during',
    'for',
    'from',
    'in',
    'of',
    'on',
    'since',
    'to',
    'until',
    'with',
}
ALLOWED_PREPOSITIONS = {
    'twinkle.api.model.v1.Operation.upload_to_hub',
    'twinkle.api.model.v1.WatchOperationsRequest.after_sequence_number',
    'twinkle.api.sampler.v1.AdapterRef.at_least',
}
"""Fields whose preposition belongs to an established term. No field may be added to this set."""
WITHOUT_DEADLINE = {
    'twinkle.api.checkpoint.v1.CheckpointService.UploadCheckpoint',
    'twinkle.api.checkpoint.v1.CheckpointService.WatchCheckpoints',
    'twinkle.api.checkpoint.v1.WeightStreamService.Publish',
    'twinkle.api.data.v1.DatasetService.Upload',
    'twinkle.api.data.v1.LoaderService.StreamBatches',
    'twinkle.api.gateway.v1.FleetService.Lease',
    'twinkle.api.gateway.v1.FleetService.WatchFleet',
    'twinkle.api.gateway.v1.MetricService.WatchMetrics',
    'twinkle.api.model.v1.AdapterService.WatchAdapters',
    'twinkle.api.model.v1.TrainingService.Train',
    'twinkle.api.model.v1.TrainingService.UploadBatch',
    'twinkle.api.model.v1.TrainingService.WatchOperations',
    'twinkle.api.sampler.v1.SamplerService.WatchLoad',
}
"""Streams without a deadline. Clients resume them instead of retrying the call."""
TENANT_ADMINISTRATION = 'twinkle.api.gateway.v1.'
"""The only package whose requests may have a field for a tenant, because administrators send these requests."""


def test_integers_are_signed() -> None:
    """No field is unsigned, because some languages have no unsigned integers."""
    assert [field.full_name for field in _fields() if field.type in UNSIGNED] == []


def test_lists_are_paged() -> None:
    """Every List method accepts page_size and page_token, and returns next_page_token."""
    violations = [
        method.full_name
        for method in _methods()
        if method.name.startswith('List')
        and not (
            {'page_size', 'page_token'} <= set(method.input_type.fields_by_name)
            and 'next_page_token' in method.output_type.fields_by_name
        )
    ]
    assert violations == []


def test_reads_have_no_side_effects() -> None:
    """Every Get and List method is declared NO_SIDE_EFFECTS, so that clients can cache and retry the calls."""
    violations = [
        method.full_name
        for method in _methods()
        if method.name.startswith(('Get', 'List'))
        and method.GetOptions().idempotency_level != MethodOptions.NO_SIDE_EFFECTS
    ]
    assert violations == []


def test_times_are_typed() -> None:
    """Fields named as times or durations are Timestamps or Durations, never numbers with an implicit unit."""
    violations = [
        field.full_name
        for field in _fields()
        if field.name.endswith(('_time', '_timeout', '_ttl', '_duration'))
        and (
            field.message_type is None
            or field.message_type.full_name not in {'google.protobuf.Timestamp', 'google.protobuf.Duration'}
        )
    ]
    assert violations == []


def test_field_names_have_no_prepositions() -> None:
    """Field names contain no prepositions, except those of established terms."""
    named = {field.full_name for field in _fields() if PREPOSITIONS & set(field.name.split('_'))}
    assert named == ALLOWED_PREPOSITIONS


def test_requests_do_not_name_a_tenant() -> None:
    """Only requests of the gateway's package, which contains the administration of tenants, have a tenant field."""
    violations = [
        field.full_name
        for field in _fields()
        if field.name in {'tenant', 'tenant_id'}
        and field.containing_type.name.endswith('Request')
        and not field.full_name.startswith(TENANT_ADMINISTRATION)
    ]
    assert violations == []


def test_service_config_covers_every_method() -> None:
    """The service config names exactly the methods of the contracts, except streams without a deadline."""
    config = json.loads((resources.files(twinkle.api) / 'service_config.json').read_text())
    named = [f'{name["service"]}.{name["method"]}' for entry in config['methodConfig'] for name in entry['name']]
    assert len(named) == len(set(named))
    assert set(named) == {method.full_name for method in _methods()} - WITHOUT_DEADLINE


def _files() -> Iterator[FileDescriptor]:
    for info in pkgutil.walk_packages(twinkle.api.__path__, prefix='twinkle.api.'):
        if info.name.endswith('_pb2'):
            yield importlib.import_module(info.name).DESCRIPTOR


def _fields() -> Iterator[FieldDescriptor]:
    pending: list[Descriptor] = [message for file in _files() for message in file.message_types_by_name.values()]
    while pending:
        message = pending.pop()
        pending += message.nested_types
        if not message.GetOptions().map_entry:
            yield from message.fields


def _methods() -> Iterator[MethodDescriptor]:
    for file in _files():
        for service in file.services_by_name.values():
            yield from service.methods
