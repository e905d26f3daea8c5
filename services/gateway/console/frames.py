"""The gRPC-Web protocol: frames of messages and trailers, the timeout header, and the accepted content types.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-WEB.md
"""

import base64
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from urllib.parse import quote

from twinkle_services.kit.errors import InvalidField

WEB_TYPE = 'application/grpc-web+proto'
_TYPES = frozenset({WEB_TYPE, 'application/grpc-web'})
HEAD_BYTES = 5
"""Bytes of a frame before its content: a byte of flags, and the length."""
_COMPRESSED, _TRAILERS = 0x01, 0x80
_TIMEOUT = re.compile(r'([0-9]{1,8})([HMSmun])')
_UNIT_SECONDS = {'H': 3600.0, 'M': 60.0, 'S': 1.0, 'm': 1e-3, 'u': 1e-6, 'n': 1e-9}
_MAX_TIMEOUT = timedelta(days=365)
_UNQUOTED = ' !"#$&\'()*+,-./:;<=>?@[\\]^_`{|}~'
"""Printable ASCII characters other than letters and digits that `grpc-message` contains unchanged."""


def is_web_call(headers: Mapping[str, str]) -> bool:
    """Return whether a request has a content type of binary gRPC-Web."""
    return headers.get('content-type', '').partition(';')[0].strip().lower() in _TYPES


def check_web_call(headers: Mapping[str, str]) -> None:
    """Refuse requests of other protocols, and compressed ones.

    The content type also protects sessions: a browser sends a request with this content type for a page of another site
    only if the server consents, and this server never does.

    Raises:
        InvalidField: the content type or the encoding is not supported.
    """
    if not is_web_call(headers):
        raise InvalidField('content-type', f'must be {WEB_TYPE}, got {headers.get("content-type", "")[:80]!r}')
    for name in ('content-encoding', 'grpc-encoding'):
        if headers.get(name, 'identity').strip().lower() != 'identity':
            raise InvalidField(name, 'must be absent; compressed messages are not supported')


def timeout_seconds(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of the header `grpc-timeout`; None without this header.

    Raises:
        InvalidField: the header is malformed.
    """
    text = headers.get('grpc-timeout')
    if text is None:
        return None
    match = _TIMEOUT.fullmatch(text)
    if match is None:
        raise InvalidField(
            'grpc-timeout', f'must be up to 8 digits and a unit of H, M, S, m, u or n, got {text[:20]!r}'
        )
    return min(int(match[1]) * _UNIT_SECONDS[match[2]], _MAX_TIMEOUT.total_seconds())


def message_in(body: bytes) -> bytes:
    """Return the only message of a request's body.

    Raises:
        InvalidField: the body is not exactly one frame with an uncompressed message.
    """
    if len(body) < HEAD_BYTES:
        raise InvalidField('body', f'must be one frame of at least {HEAD_BYTES} bytes, got {len(body)} bytes')
    flags, size = body[0], int.from_bytes(body[1:HEAD_BYTES], 'big')
    if flags & _COMPRESSED:
        raise InvalidField('body', 'has a compressed frame; send grpc-encoding identity')
    if flags:
        raise InvalidField('body', f'has a frame with the flags {flags:#04x}; send one message frame with the flags 0')
    if size != len(body) - HEAD_BYTES:
        raise InvalidField('body', f'must be one frame; its length says {size} bytes, got {len(body) - HEAD_BYTES}')
    return body[HEAD_BYTES:]


def message_frame(message: bytes) -> bytes:
    """Return the frame of a response message."""
    return bytes([0]) + len(message).to_bytes(4, 'big') + message


def trailers_frame(code: int, message: str, metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Return the last frame of a response, with status and trailing metadata.

    Args:
        code: Number of the status.
        message: Text of the status, which is percent-encoded.
        metadata: Trailing metadata; values of keys with the suffix '-bin' are bytes, which are encoded as base64.
    """
    lines = [f'grpc-status: {code}']
    if message:
        lines.append(f'grpc-message: {quote(message, safe=_UNQUOTED)}')
    lines += [f'{key}: {_text_of(value)}' for key, value in metadata]
    content = ''.join(f'{line}\r\n' for line in lines).encode('ascii', 'replace')
    return bytes([_TRAILERS]) + len(content).to_bytes(4, 'big') + content


def _text_of(value: str | bytes) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
