"""Fields read from serialized messages equal those of the parser."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_service_pb2
from twinkle_services.kit.rpc.serialized_fields import MAX_FIELDS, UnreadableMessageError, has_field, peek_text


def _request(adapter_id: str, *, number: int = 3) -> training_service_pb2.ExecuteRequest:
    operation = operation_pb2.Operation(adapter_id=adapter_id, sequence_number=number)
    operation.forward_backward.batch.upload_id = 'x' * 300
    return training_service_pb2.ExecuteRequest(operation=operation, is_waiting_allowed=True)


def test_text_is_found_in_nested_messages() -> None:
    """A string is found in nested messages and after fields of other types."""
    assert peek_text(_request('ad-1').SerializeToString(), 1, 1) == 'ad-1'
    create = adapter_service_pb2.CreateAdapterRequest(request_id='r', base_model='tiny', is_optimizer_included=True)
    assert peek_text(create.SerializeToString(), 2) == 'tiny'
    assert peek_text(create.SerializeToString(), 10) == ''


def test_repeated_messages_are_merged() -> None:
    """Repeated embedded messages are merged as by the parser, so the last string that is set is returned."""
    parts = [_request('ad-1'), _request('ad-2'), _request('')]
    raw = b''.join(part.SerializeToString() for part in parts)
    parsed = training_service_pb2.ExecuteRequest.FromString(raw)
    assert peek_text(raw, 1, 1) == parsed.operation.adapter_id == 'ad-2'


@given(st.text(max_size=40), st.integers(-(2**63), 2**63 - 1))
def test_any_text_is_found(adapter_id: str, number: int) -> None:
    """Any string is found, for any number in the same message."""
    raw = _request(adapter_id, number=number).SerializeToString()
    assert peek_text(raw, 1, 1) == adapter_id


@given(st.binary(max_size=64))
def test_random_bytes_give_a_text_or_the_error(data: bytes) -> None:
    """Random bytes are read as a string, or raise UnreadableMessageError."""
    try:
        found = peek_text(data, 1, 1)
    except UnreadableMessageError:
        return
    assert isinstance(found, str)


@pytest.mark.parametrize('cut', [1, 2, 5])
def test_truncated_message_is_refused(cut: int) -> None:
    """A field that extends beyond the end of the message is an error."""
    raw = _request('ad-1').operation.SerializeToString()
    with pytest.raises(UnreadableMessageError):
        peek_text(raw[:-cut], 1)


def test_number_of_fields_is_limited() -> None:
    """A message with more than `MAX_FIELDS` fields is refused."""
    raw = adapter_service_pb2.GetAdapterRequest(adapter_id='a').SerializeToString() * (MAX_FIELDS + 1)
    with pytest.raises(UnreadableMessageError):
        peek_text(raw, 1)


def test_presence_of_an_embedded_message_is_detected() -> None:
    """An embedded message is present even if it is empty."""
    request = training_service_pb2.UploadBatchRequest()
    assert not has_field(request.SerializeToString(), 1)
    request.header.SetInParent()
    assert has_field(request.SerializeToString(), 1)
