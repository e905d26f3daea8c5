"""The chunk codec writes and reads the same bytes as the generated code."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from twinkle.api.checkpoint.v1 import weight_stream_service_pb2 as wire
from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.checkpoint_engine import StateChunk
from twinkle_services.kit.weights.wire import codec
from twinkle_services.kit.weights.wire.convert_frames import frame_of
from twinkle_services.kit.weights.wire.convert_manifest import chunk_to_proto

_INT64 = st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from([0, 1, -1, 127, 128, 1 << 20])
chunks = st.builds(StateChunk, offset=_INT64, data=st.binary(max_size=400), checksum=_INT64)

_MESSAGES = [
    (wire.PublishRequest, codec.encode_published, codec.decode_published),
    (wire.SubscribeResponse, codec.encode_subscribed, codec.decode_subscribed),
    (wire.FetchResponse, codec.encode_fetched, codec.decode_fetched),
]
"""Message class, encoder and decoder of each stream with chunks."""


def _generated(message_class, chunk):
    return message_class(frame=weights_pb2.WeightFrame(chunk=chunk_to_proto(chunk)))


def _values(message):
    chunk = frame_of(message)
    return (chunk.offset, bytes(chunk.data), chunk.checksum)


@pytest.mark.parametrize(('message_class', 'encode', 'decode'), _MESSAGES)
@given(chunk=chunks)
def test_bytes_are_those_of_the_generated_code(message_class, encode, decode, chunk) -> None:
    """The codec and the generated code write equal bytes, and each reads the output of the other."""
    generated = _generated(message_class, chunk)
    data = encode(chunk)
    assert data == generated.SerializeToString()
    assert message_class.FromString(data) == generated
    decoded = decode(data)
    assert isinstance(decoded, StateChunk)
    assert _values(decoded) == (chunk.offset, chunk.data, chunk.checksum)


@given(
    data=st.binary(max_size=60) | chunks.map(codec.encode_chunk), cut=st.integers(0, 80), extra=st.binary(max_size=6)
)
def test_codec_agrees_with_the_generated_code_on_any_bytes(data: bytes, cut: int, extra: bytes) -> None:
    """The codec and the generated code return equal values or both fail for random, truncated and extended messages."""
    for message_class, _, decode in _MESSAGES:
        for candidate in (data, data[:cut], data + extra, data[:cut] + extra + data[cut:]):
            _check_agreement(message_class, decode, candidate)


def _check_agreement(message_class, decode, data) -> None:
    try:
        expected = message_class.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            decode(data)
        return
    decoded = decode(data)
    if isinstance(decoded, StateChunk):
        assert expected.frame.WhichOneof('frame') == 'chunk'
        assert _values(decoded) == _values(expected)
    else:
        assert decoded == expected


def _field(number: int, payload: bytes) -> bytes:
    return bytes([number << 3 | 2, len(payload)]) + payload


@pytest.mark.parametrize(
    'inner',
    [
        b'\x18\x05\x12\x02ab\x08\x07',  # fields in another order
        b'\x08\x01\x08\x07\x12\x02ab\x18\x05',  # a repeated field: the last value is used
        b'\x08\x07\x12\x01z\x12\x02ab\x18\x05',
        b'\x08\x07\x12\x02ab\x18\x05\x22\x03new',  # a field of a later contract
        b'\x08\x87\x00\x12\x02ab\x18\x85\x00',  # varints that are longer than necessary
    ],
)
def test_unusual_encodings_of_a_chunk_are_read(inner: bytes) -> None:
    """Unusual but valid encodings of a chunk are read as by the generated code."""
    data = _field(1, _field(2, inner))
    assert _values(codec.decode_published(data)) == (7, b'ab', 5)
    assert _values(wire.PublishRequest.FromString(data)) == (7, b'ab', 5)


def test_other_frames_are_parsed_by_the_generated_code() -> None:
    """Headers, events and empty messages are read as by the generated code."""
    header = wire.PublishRequest(frame=weights_pb2.WeightFrame(header=weights_pb2.FrameHeader(adapter_id='a')))
    assert codec.decode_published(codec.encode_published(header)) == header
    synced = wire.SubscribeResponse(is_synced=True)
    assert codec.decode_subscribed(codec.encode_subscribed(synced)) == synced
    assert codec.decode_fetched(b'') == wire.FetchResponse()


def test_bytes_of_a_chunk_are_a_view_of_the_message() -> None:
    """Reading a chunk does not copy its data."""
    message = codec.encode_chunk(StateChunk(0, bytes(1000), 3))
    decoded = codec.decode_published(message)
    assert isinstance(decoded, StateChunk)
    assert isinstance(decoded.data, memoryview)
    assert decoded.data.obj is message


def test_chunk_message_has_only_the_known_fields() -> None:
    """The fields and numbers that the codec relies on are those of the contract; `sha256` is only sent in uploads."""
    fields = [(field.name, field.number) for field in tensor_pb2.TensorChunk.DESCRIPTOR.fields]
    assert fields == [('offset', 1), ('data', 2), ('checksum', 3), ('sha256', 4)]
    assert weights_pb2.WeightFrame.DESCRIPTOR.fields_by_name['chunk'].number == 2
    assert {message.DESCRIPTOR.fields_by_name['frame'].number for message, _, _ in _MESSAGES} == {1}
