"""A text is read out of a serialized message exactly as the parser reads it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.rpc.serialized_fields import MAX_FIELDS, UnreadableMessageError, has_field, peek_text
from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_service_pb2


def _request(adapter_id: str, *, number: int = 3) -> training_service_pb2.ExecuteRequest:
    operation = operation_pb2.Operation(adapter_id=adapter_id, sequence_number=number)
    operation.forward_backward.batch.upload_id = 'x' * 300
    return training_service_pb2.ExecuteRequest(operation=operation, is_waiting_allowed=True)


def test_text_is_read_beside_and_inside_other_fields() -> None:
    """Wherever it stands, and also where other kinds of fields stand before it."""
    assert peek_text(_request('ad-1').SerializeToString(), 1, 1) == 'ad-1'
    create = adapter_service_pb2.CreateAdapterRequest(request_id='r', base_model='tiny', is_optimizer_included=True)
    assert peek_text(create.SerializeToString(), 2) == 'tiny'
    assert peek_text(create.SerializeToString(), 10) == ''


def test_messages_behind_each_other_are_read_as_merged() -> None:
    """Of two adapters the last one counts, and a later part without one leaves the first, as in the parser."""
    parts = [_request('ad-1'), _request('ad-2'), _request('')]
    raw = b''.join(part.SerializeToString() for part in parts)
    parsed = training_service_pb2.ExecuteRequest.FromString(raw)
    assert peek_text(raw, 1, 1) == parsed.operation.adapter_id == 'ad-2'


@given(st.text(max_size=40), st.integers(-(2**63), 2**63 - 1))
def test_what_is_read_is_what_the_parser_reads(adapter_id: str, number: int) -> None:
    """For any text, and any number before it."""
    raw = _request(adapter_id, number=number).SerializeToString()
    assert peek_text(raw, 1, 1) == adapter_id


@given(st.binary(max_size=64))
def test_bytes_that_are_no_message_are_refused_or_read(data: bytes) -> None:
    """Whatever comes, there is a text or the one error."""
    try:
        found = peek_text(data, 1, 1)
    except UnreadableMessageError:
        return
    assert isinstance(found, str)


@pytest.mark.parametrize('cut', [1, 2, 5])
def test_message_that_was_cut_is_refused(cut: int) -> None:
    """A field that ends behind the end is no field."""
    raw = _request('ad-1').operation.SerializeToString()
    with pytest.raises(UnreadableMessageError):
        peek_text(raw[:-cut], 1)


def test_message_of_very_many_fields_is_not_read_through() -> None:
    """Who sends a million fields does not hold the others up."""
    raw = adapter_service_pb2.GetAdapterRequest(adapter_id='a').SerializeToString() * (MAX_FIELDS + 1)
    with pytest.raises(UnreadableMessageError):
        peek_text(raw, 1)


def test_presence_of_a_message_is_told_without_reading_it() -> None:
    """An empty one is present as well."""
    request = training_service_pb2.UploadBatchRequest()
    assert not has_field(request.SerializeToString(), 1)
    request.header.SetInParent()
    assert has_field(request.SerializeToString(), 1)
