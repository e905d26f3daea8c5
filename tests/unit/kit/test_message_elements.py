"""The elements of a serialized message are limited before it is parsed."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.api.checkpoint.v1 import checkpoint_service_pb2
from twinkle.api.data.v1 import dataset_service_pb2
from twinkle.api.model.v1 import adapter_service_pb2
from twinkle.api.model.v1 import training_service_pb2 as wire
from twinkle.api.sampler.v1 import sampler_service_pb2
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.message_elements import MAX_ELEMENTS, check_elements

Path = tuple[int, ...]
"""Field numbers from a message to one of its fields."""


def varint(value: int) -> bytes:
    """Return the encoding of a number."""
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def delimited(number: int, content: bytes) -> bytes:
    """Return the encoding of a field with a length."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def nested(path: Path, content: bytes) -> bytes:
    """Return a message in which `content` is the encoding of the message that `path` leads to."""
    for number in reversed(path):
        content = delimited(number, content)
    return content


def repeated_fields(message_type: Any, depth: int = 5) -> Iterator[tuple[Path, Any]]:
    """Yield the repeated fields of a message type and its submessages, each with the path of its message."""
    for field in message_type.fields if depth else ():
        if field.is_repeated:
            yield (), field
        if field.message_type is not None:
            for path, found in repeated_fields(field.message_type, depth - 1):
                yield (field.number, *path), found


REQUESTS: dict[str, Any] = {
    method.full_name: method.input_type
    for file in (checkpoint_service_pb2, dataset_service_pb2, adapter_service_pb2, wire, sampler_service_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


@pytest.mark.parametrize('method', sorted(REQUESTS))
def test_every_repeated_field_is_limited(method: str) -> None:
    """Any repeated field of any request is refused above the limit, whether its elements are packed or not."""
    request_type = REQUESTS[method]
    for path, field in repeated_fields(request_type):
        too_many = [delimited(field.number, b'') * 201]
        if _is_packed(field):
            too_many.append(delimited(field.number, b'\x01' * 4000))
        for content in too_many:
            with pytest.raises(InvalidField, match='at most 200 elements'):
                check_elements(nested(path, content), request_type, limit=200)
        check_elements(nested(path, delimited(field.number, b'') * 190), request_type, limit=200)


def _is_packed(field: Any) -> bool:
    return field.message_type is None and field.type not in (field.TYPE_STRING, field.TYPE_BYTES)


def test_message_at_the_limit_is_accepted() -> None:
    """The bytes of a field do not count as elements, and unknown fields count like known fields."""
    request = wire.ExecuteRequest()
    request.operation.forward_backward.batch.features.features.add().input_ids.data = bytes(8 << 20)
    check_elements(request.SerializeToString(), request.DESCRIPTOR)
    unknown = varint(500 << 3) + b'\x01'
    check_elements(unknown * MAX_ELEMENTS, request.DESCRIPTOR)
    with pytest.raises(InvalidField, match='request'):
        check_elements(unknown * (MAX_ELEMENTS + 1), request.DESCRIPTOR)


@given(st.binary(max_size=200), st.integers(0, 1 << 40), st.sampled_from(sorted(REQUESTS)))
def test_damaged_bytes_pass(damage: bytes, size: int, method: str) -> None:
    """Bytes that are not a message end the count without an error, because the parser refuses them later."""
    message = varint(1 << 3 | 2) + varint(size) + damage
    check_elements(message, REQUESTS[method], limit=100)
