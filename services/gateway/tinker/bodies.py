"""Reads bodies of Tinker clients in JSON, protobuf and zstd within limits, and defines fields of several bodies."""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any, TypeVar, cast

import zstandard
from google.protobuf.message import DecodeError
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationInfo

from twinkle_services.gateway.catalogue.paths import WeightsPath, parse_path
from twinkle_services.gateway.http.body import INLINE_BYTES, parse_object, read_bytes, read_chunks
from twinkle_services.gateway.http.call import (
    HEAD_BYTES,
    JSON_TYPE,
    BodyEnds,
    HttpCall,
    json_work_bytes,
    message_work_bytes,
)
from twinkle_services.gateway.http.validation import JsonModel, read_model
from twinkle_services.gateway.tinker.wire import tinker_pb2 as wire
from twinkle_services.kit.errors import InvalidField, MessageTooLarge

PROTOBUF_TYPE = 'application/x-protobuf'
JSON_LIMIT_BYTES = 4 << 20
"""Maximum number of bytes of a body without examples."""
MAX_SEQ_ID = (1 << 31) - 1
_PIECE_BYTES = 1 << 20
_SLICE_BYTES = 1 << 8
"""Number of compressed bytes that are decoded at a time; they expand to a few MiB at most."""
_WINDOW_BYTES = 1 << 27
"""Maximum size of a decompression window, and maximum number of bytes that are decompressed from a refused body."""
_MAX_LABELS, _LABEL_NAME, _LABEL_VALUE = 60, 256, 4096
_DECODER = json.JSONDecoder(strict=False)
_MEMBER = re.compile(r'\s*[{,]\s*"((?:[^"\\]|\\.)*)"\s*:\s*')
_POSITION = re.compile(r'(?<!\\)"(?:model_id|seq_id)"\s*:')
_NUMBER = re.compile(rb'\x10[\x80-\xff]{0,4}[\x00-\x7f]')
"""Pattern of the encoded field 2 of a message, a positive number."""

Parsed = TypeVar('Parsed')
Body = TypeVar('Body', bound='TinkerModel')


class TinkerModel(JsonModel):
    """JSON object whose unknown fields are ignored, because new versions of the SDK add fields."""

    model_config = ConfigDict(extra='ignore')


def _labels(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if len(cast('dict[str, Any]', value)) > _MAX_LABELS:
        raise ValueError(f'must have at most {_MAX_LABELS} entries')
    labels: dict[str, str] = {}
    for name, item in cast('dict[str, Any]', value).items():
        label = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
        if len(name) > _LABEL_NAME or len(label) > _LABEL_VALUE or any(character < ' ' for character in name + label):
            limits = f'names may have {_LABEL_NAME} characters, values {_LABEL_VALUE}'
            raise ValueError(f'{limits}, and neither may contain control characters')
        if not name or name.startswith('tinker:'):
            raise ValueError('names must not be empty or begin with "tinker:"')
        labels[name] = label
    return labels


def _weights_path(value: Any, info: ValidationInfo) -> WeightsPath:
    return parse_path(value, info.field_name or 'path')


def _optimizer_kind(kind: str) -> str:
    if kind not in {'adamw', 'adam'}:
        raise ValueError(f'must be adamw, got {kind[:100]!r}; no other optimizer is supported')
    return kind


ShortText = Annotated[str, Field(max_length=1024)]
ModelId = Annotated[str, Field(min_length=1, max_length=128)]
SeqId = Annotated[int, Field(ge=1, le=MAX_SEQ_ID)]
"""Position of an operation among the operations of its model, from 1."""
Counter = Annotated[int, Field(ge=0, le=MAX_SEQ_ID)]
LongCounter = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
BaseModelName = Annotated[str, Field(min_length=1, max_length=256)]
Labels = Annotated[dict[str, str], BeforeValidator(_labels)]
"""Labels that the client chooses; values that are not strings are stored as JSON."""
WeightsPathField = Annotated[WeightsPath, PlainValidator(_weights_path)]
"""Path of saved weights. Use it only for fields at the top level of a body."""
OptimizerKind = Annotated[str, AfterValidator(_optimizer_kind)]


class OperationBody(TinkerModel):
    """Fields of every operation on a model."""

    model_id: ModelId
    seq_id: SeqId


async def read_body(call: HttpCall, model: type[Body], *, limit_bytes: int = JSON_LIMIT_BYTES) -> Body:
    """Read and validate a JSON body; an empty body is an empty object. Raise the errors of `read_message`."""
    return await read_json(call, lambda body: read_model(model, body), limit_bytes=limit_bytes)


async def read_object(call: HttpCall, *, limit_bytes: int = JSON_LIMIT_BYTES) -> dict[str, Any]:
    """Read a JSON body without validating its fields. Raise the errors of `read_message`."""
    return await read_json(call, lambda body: body, limit_bytes=limit_bytes)


async def read_json(call: HttpCall, make: Callable[[dict[str, Any]], Parsed], *, limit_bytes: int) -> Parsed:
    """Apply `make` to the JSON object in the body. Raise the errors of `read_message`."""
    if is_protobuf(call):
        raise InvalidField('content-type', f'must be {JSON_TYPE}')
    return await read_message(call, lambda data: make(parse_object(data or b'{}')), limit_bytes=limit_bytes)


async def read_message(call: HttpCall, make: Callable[[bytes], Parsed], *, limit_bytes: int) -> Parsed:
    """Apply `make` to the decompressed body; long bodies are parsed in a worker thread.

    Raises:
        MessageTooLarge: the body is longer than `limit_bytes` as sent or after decompression.
        InvalidField: the compression is unknown, or the body has the wrong format or a wrong field.
        BytesFull, DeadlinePassed, ClientDisconnected: see `http.body.read_bytes`.
    """
    encoding = call.headers.get('content-encoding', 'identity').strip().lower()
    if encoding not in {'identity', 'zstd'}:
        raise InvalidField('content-encoding', 'must be zstd, or absent')
    data = await read_bytes(call, limit_bytes=limit_bytes)
    call.body_ends.add(data)
    if encoding == 'zstd':
        data, call.body_ends = await _decompressed_body(call, data, limit_bytes), BodyEnds()
        call.body_ends.add(data)
    await call.reserve_work(message_work_bytes(data) if is_protobuf(call) else json_work_bytes(data))
    return await asyncio.to_thread(make, data) if len(data) > INLINE_BYTES else make(data)


async def position_in(call: HttpCall) -> tuple[Any, Any]:
    """Find the model id and the position in the first or last bytes of a refused body; None replaces a missing value.

    The SDK writes these fields first in protobuf, and first or last in JSON.

    Raises:
        DeadlinePassed, ClientDisconnected: see `http.body.read_chunks`.
    """
    if not call.body_ends.head and not call.body_done.is_set():
        async for chunk in read_chunks(call):
            call.body_ends.add(chunk)
            if len(call.body_ends.head) == HEAD_BYTES:
                break
    find = _message_position if is_protobuf(call) else _json_position
    return await asyncio.to_thread(lambda: find(_decompressed_ends(call.body_ends)))


def _decompressed_ends(ends: BodyEnds) -> BodyEnds:
    """Return the ends of a body, decompressed up to the first missing or damaged block."""
    if not ends.head.startswith(zstandard.FRAME_HEADER):
        return ends
    found, size_bytes = BodyEnds(), 0
    with suppress(zstandard.ZstdError):
        for piece in _slices(_new_frame(), bytes(ends.head)):
            found.add(piece)
            size_bytes += len(piece)
            if size_bytes > _WINDOW_BYTES:
                break
    return found


def _message_position(ends: BodyEnds) -> tuple[Any, Any]:
    head = bytes(ends.head)
    # The message begins with a key, the length of the id in one byte, and the id.
    number = _NUMBER.match(head, 2 + head[1]) if head[:1] == b'\n' and len(head) > 1 else None
    if number is not None:
        with suppress(DecodeError):
            message = wire.ForwardBackwardRequest.FromString(head[: number.end()])
            return message.model_id, message.seq_id
    return None, None


def _json_position(ends: BodyEnds) -> tuple[Any, Any]:
    """Find the model id and the position among the complete members at both ends of a damaged JSON object."""
    text, members, end = ends.head.decode(errors='replace'), dict[str, Any](), 0
    with suppress(ValueError, RecursionError):
        while member := _MEMBER.match(text, end):
            value, end = _DECODER.raw_decode(text, member.end())
            # A number at the end may be incomplete.
            members |= {member[1]: value} if end < len(text) else {}
    text = ends.tail.decode(errors='replace')
    for found in _POSITION.finditer(text):
        # The rest of the text is an object only if this member belongs to the outermost object.
        with suppress(ValueError, RecursionError):
            members |= _DECODER.decode('{' + text[found.start() :])
            break
    return members.get('model_id'), members.get('seq_id')


def is_protobuf(call: HttpCall) -> bool:
    return _media_type(call.headers.get('content-type', '')) == PROTOBUF_TYPE


def accepts_protobuf(call: HttpCall) -> bool:
    return any(_media_type(part) == PROTOBUF_TYPE for part in call.headers.get('accept', '').split(','))


async def _decompressed_body(call: HttpCall, data: bytes, limit_bytes: int) -> bytes:
    """Decompress a body in a worker thread, and reserve memory for each piece."""
    await call.reserve_work(_window_bytes(data))
    pieces = decompressed_pieces(data, limit_bytes=limit_bytes)
    found: list[bytes] = []
    while piece := await asyncio.to_thread(next, pieces, b''):
        await call.reserve_body(len(piece))
        found.append(piece)
    call.release_work()
    return b''.join(found)


def decompressed_pieces(data: bytes, *, limit_bytes: int) -> Iterator[bytes]:
    """Decompress one zstd frame in non-empty pieces of a few MiB.

    Raises:
        MessageTooLarge: the content is longer than `limit_bytes`; only a little more is decompressed.
        InvalidField: the frame is not zstd, or incomplete.
    """
    try:
        declared = zstandard.frame_content_size(data)
        if declared > limit_bytes:
            raise MessageTooLarge(size_bytes=declared, limit_bytes=limit_bytes)
        frame = _new_frame()
        yield from _gathered(_slices(frame, data), limit_bytes)
    except zstandard.ZstdError as error:
        raise InvalidField('body', 'must be zstd, as declared by content-encoding') from error
    if not frame.eof:
        raise InvalidField('body', 'is incomplete')


def _new_frame() -> Any:
    return zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()


def _slices(frame: Any, data: bytes) -> Iterator[bytes]:
    """Decompress a few bytes at a time: four bytes may encode a block of 128 KiB."""
    for begin in range(0, len(data), _SLICE_BYTES):
        yield frame.decompress(data[begin : begin + _SLICE_BYTES])
        if frame.eof:
            return


def _gathered(slices: Iterable[bytes], limit_bytes: int) -> Iterator[bytes]:
    found: list[bytes] = []
    size_bytes = pending_bytes = 0
    for piece in slices:
        found.append(piece)
        size_bytes += len(piece)
        pending_bytes += len(piece)
        if size_bytes > limit_bytes:
            raise MessageTooLarge(size_bytes=size_bytes, limit_bytes=limit_bytes)
        if pending_bytes >= _PIECE_BYTES:
            yield b''.join(found)
            found, pending_bytes = [], 0
    if pending_bytes:
        yield b''.join(found)


def _window_bytes(data: bytes) -> int:
    """Return the size of the decompression window; 0 if the data is not a zstd frame."""
    try:
        return min(zstandard.get_frame_parameters(data).window_size, _WINDOW_BYTES)
    except zstandard.ZstdError:
        return 0


def _media_type(text: str) -> str:
    return text.partition(';')[0].strip().lower()


def labels_to_json(labels: Mapping[str, str]) -> dict[str, str] | None:
    """Return the labels without those that store fields of Tinker sessions; None if no labels remain."""
    return {name: value for name, value in labels.items() if not name.startswith('tinker:')} or None


def time_to_json(time: datetime | None) -> str | None:
    """Return a time in ISO 8601, or None if there is no time."""
    return None if time is None else time.isoformat()
