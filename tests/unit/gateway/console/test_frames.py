"""Tests of the frames, timeouts and content types of gRPC-Web."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.console_client import frame, parse_frames
from twinkle_services.gateway.console.frames import (
    check_web_call,
    is_web_call,
    message_frame,
    message_in,
    timeout_seconds,
    trailers_frame,
)
from twinkle_services.kit.errors import InvalidField


@given(st.binary(max_size=300))
def test_message_is_returned_unchanged(message: bytes) -> None:
    """A message that is written into a frame is read back bitwise equal."""
    assert message_in(message_frame(message)) == message


@given(st.binary(max_size=64))
def test_arbitrary_bodies_are_refused_or_exact(body: bytes) -> None:
    """A body that is not exactly one frame is refused."""
    is_one_frame = len(body) >= 5 and body[0] == 0 and int.from_bytes(body[1:5], 'big') == len(body) - 5
    if is_one_frame:
        assert message_frame(message_in(body)) == body
        return
    with pytest.raises(InvalidField) as caught:
        message_in(body)
    assert caught.value.field == 'body'


def test_compressed_frame_is_named() -> None:
    """The error about a compressed frame names the encoding."""
    with pytest.raises(InvalidField) as caught:
        message_in(frame(b'x', flags=1))
    assert 'grpc-encoding' in caught.value.problem


@given(st.text(max_size=100))
def test_status_message_is_decoded_to_the_same_text(text: str) -> None:
    """A status message, even with line ends, is one line of ASCII and is decoded to the same text."""
    cleaned = text.encode(errors='ignore').decode()
    result = parse_frames(trailers_frame(5, cleaned, ()))
    assert (result.code, result.text) == (5, cleaned)


def test_trailers_contain_text_and_binary_metadata() -> None:
    """Values of binary keys are base64, and other values are unchanged."""
    result = parse_frames(trailers_frame(0, '', [('x-request-id', 'rq-1'), ('grpc-status-details-bin', b'\x00\xff')]))
    assert result.trailers['x-request-id'] == 'rq-1'
    assert base64.b64decode(result.trailers['grpc-status-details-bin']) == b'\x00\xff'
    assert 'grpc-message' not in result.trailers


@pytest.mark.parametrize(
    ('text', 'seconds'),
    [('1H', 3600), ('2M', 120), ('3S', 3), ('4m', 0.004), ('5u', 5e-6), ('6n', 6e-9), ('99999999H', 31_536_000)],
)
def test_timeout_is_read_with_its_unit(text: str, seconds: float) -> None:
    """Each unit of the header is known, and timeouts above a year are reduced to a year."""
    assert timeout_seconds({'grpc-timeout': text}) == pytest.approx(seconds)


def test_absent_timeout_is_none() -> None:
    """A call without the header has no timeout."""
    assert timeout_seconds({}) is None


@pytest.mark.parametrize('text', ['', 'S', '1', '1s', '1 S', '-1S', '1.5S', '123456789S', '1S '])
def test_malformed_timeout_is_refused(text: str) -> None:
    """A header that the protocol does not define is refused with an error that names the header."""
    with pytest.raises(InvalidField) as caught:
        timeout_seconds({'grpc-timeout': text})
    assert caught.value.field == 'grpc-timeout'


@pytest.mark.parametrize(
    ('content_type', 'is_accepted'),
    [
        ('application/grpc-web+proto', True),
        ('Application/gRPC-Web', True),
        ('application/grpc-web+proto; charset=utf-8', True),
        ('application/grpc-web-text', False),
        ('application/grpc-web+json', False),
        ('application/grpc', False),
        ('text/plain', False),
        ('', False),
    ],
)
def test_only_binary_grpc_web_is_accepted(content_type: str, *, is_accepted: bool) -> None:
    """Only content types of the binary protocol are accepted; their parameters and case do not matter."""
    assert is_web_call({'content-type': content_type}) is is_accepted
    if not is_accepted:
        with pytest.raises(InvalidField):
            check_web_call({'content-type': content_type})
