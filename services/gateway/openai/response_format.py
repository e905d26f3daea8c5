"""The form that a completion has to have, as `response_format` says it."""

from collections.abc import Mapping
from typing import Any

from services.gateway.http.call import json_bytes
from services.gateway.http.fields import is_shallow, mapping, text
from services.kit.errors import InvalidField
from services.kit.rpc.structs import struct_of
from twinkle.api.sampler.v1 import sampling_pb2

MAX_SCHEMA_DEPTH = 24
"""A message nests three levels for each of a schema, and its readers stop at a hundred."""
MAX_SCHEMA_BYTES = 1 << 16
"""Each of a request's prompts is sampled with its own copy."""


def structured_output_of(value: Mapping[str, Any]) -> sampling_pb2.StructuredOutput | None:
    """Return the form; None where any text will do.

    Raises:
        InvalidField: there is no such form, or the schema is no schema.
    """
    match value.get('type'):
        case 'text':
            _check_names(value, 'response_format', {'type'})
            return None
        case 'json_object':
            _check_names(value, 'response_format', {'type'})
            return sampling_pb2.StructuredOutput(is_json_object=True)
        case 'json_schema':
            _check_names(value, 'response_format', {'type', 'json_schema'})
            return _schema_of(mapping(value.get('json_schema'), 'response_format.json_schema'))
        case _:
            raise InvalidField('response_format.type', 'must be "text", "json_object" or "json_schema"')


def _schema_of(value: Mapping[str, Any]) -> sampling_pb2.StructuredOutput:
    field = 'response_format.json_schema'
    _check_names(value, field, {'name', 'description', 'schema', 'strict'})
    text(value.get('name'), f'{field}.name')
    if value.get('strict') not in (None, True):
        raise InvalidField(f'{field}.strict', 'must be true or absent; a schema is always held to')
    schema = mapping(value.get('schema'), f'{field}.schema')
    if not is_shallow(schema, MAX_SCHEMA_DEPTH):
        raise InvalidField(f'{field}.schema', f'is nested deeper than {MAX_SCHEMA_DEPTH}')
    if len(json_bytes(schema)) > MAX_SCHEMA_BYTES:
        raise InvalidField(f'{field}.schema', f'is longer than {MAX_SCHEMA_BYTES} bytes')
    return sampling_pb2.StructuredOutput(json_schema=struct_of(schema))


def _check_names(value: Mapping[str, Any], field: str, known: set[str]) -> None:
    for name in value:
        if name not in known:
            raise InvalidField(f'{field}.{name[:100]}', 'is not known')
