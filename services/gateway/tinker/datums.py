"""One example of a training request as plain values, from protobuf and from JSON."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.gateway.http.fields import items, mapping, text
from services.gateway.tinker.arrays import Array, Room, array_from_json, array_from_proto
from services.gateway.tinker.fields import Fields
from services.gateway.tinker.wire import tinker_pb2 as wire
from services.kit.errors import InvalidField

TEXT_ONLY = 'pictures and sound are not served: the base models here read text'


MAX_PARTS = 1 << 16
"""Examples of a request, chunks of a prompt: each takes far more memory than the two bytes that it may come as."""
MAX_INPUTS = 64
"""Of a loss, by name."""


@dataclass(frozen=True)
class Datum:
    """An example."""

    tokens: Array
    """int64 [N]: the whole input."""
    inputs: dict[str, Array]
    """What the loss reads, by name."""


def datum_from_proto(message: wire.Datum, field: str, room: Room) -> Datum:
    """Read an example; `room` is what sparse arrays of the request may unfold to.

    Raises:
        InvalidField: it is malformed, or holds what is not text.
    """
    check_count(message.model_input, MAX_PARTS, f'{field}.model_input')
    check_count(message.loss_fn_inputs, MAX_INPUTS, f'{field}.loss_fn_inputs')
    _check_spans(message, field)
    inputs = {
        name: array_from_proto(tensor, f'{field}.loss_fn_inputs.{name[:100]}', room)
        for name, tensor in message.loss_fn_inputs.items()
    }
    return Datum(_joined([_tokens_of(chunk, field) for chunk in message.model_input]), inputs)


def datum_from_json(value: Any, field: str, room: Room) -> Datum:
    """Read an example; `room` is what sparse arrays of the request may unfold to.

    Raises:
        InvalidField: it is malformed, or holds what is not text.
    """
    fields = Fields(mapping(value, field), field)
    inputs = {
        name: array_from_json(tensor, f'{field}.loss_fn_inputs.{name[:100]}', room)
        for name, tensor in fields.need('loss_fn_inputs', mapping).items()
    }
    return Datum(tokens_from_json(fields.need('model_input', mapping), fields.path_of('model_input')), inputs)


def check_count(values: Sized, limit: int, field: str) -> None:
    """Check that there are not too many.

    Raises:
        InvalidField: there are.
    """
    if len(values) > limit:
        raise InvalidField(field, f'must have at most {limit} entries, got {len(values)}')


def tokens_from_json(model_input: dict[str, Any], field: str) -> Array:
    """Return the tokens of a model input given as JSON, int64.

    Raises:
        InvalidField: it is malformed, or holds what is not text.
    """
    chunks = Fields(model_input, field).need('chunks', items)
    return _joined([_chunk_tokens(chunk, f'{field}.chunks[{place}]') for place, chunk in enumerate(chunks)])


def _chunk_tokens(chunk: Any, field: str) -> Array:
    fields = Fields(mapping(chunk, field), field)
    if fields.get('type', text, 'encoded_text') != 'encoded_text':
        raise InvalidField(field, TEXT_ONLY)
    tokens = fields.need('tokens', items)
    if any(type(token) is not int or not 0 <= token < 1 << 31 for token in tokens):
        raise InvalidField(fields.path_of('tokens'), 'must hold token ids')
    return np.array(tokens, '<i8')


def _tokens_of(chunk: wire.Chunk, field: str) -> Array:
    if not chunk.HasField('encoded_text'):
        raise InvalidField(f'{field}.model_input', TEXT_ONLY)
    data = chunk.encoded_text.tokens
    if len(data) % 4:
        raise InvalidField(f'{field}.model_input', 'tokens must have 4 bytes each')
    return np.frombuffer(data, '<i4').astype('<i8')


def _joined(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, '<i8')


def _check_spans(message: wire.Datum, field: str) -> None:
    """Check that spans, where there are any, tile what they are of; they change nothing here."""
    for name in ('model_input_spans', 'loss_fn_input_spans'):
        for place, span in enumerate(getattr(message, name)):
            kind = span.WhichOneof('span')
            part = getattr(span, kind) if kind else None
            if part is None or part.offset < 0 or part.length < 0:
                raise InvalidField(f'{field}.{name}[{place}]', 'must name a stretch of a prompt or of a sample')
