"""A forward or forward-backward request as plain values, from protobuf and from the JSON of SDKs up to 0.24."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from services.gateway.http.fields import items, mapping, text
from services.gateway.tinker.arrays import Room
from services.gateway.tinker.datums import MAX_PARTS, Datum, check_count, datum_from_json, datum_from_proto
from services.gateway.tinker.fields import Fields
from services.gateway.tinker.operations import check_model_id, check_seq_id
from services.gateway.tinker.wire import tinker_pb2 as wire
from services.kit.errors import InvalidField


@dataclass(frozen=True)
class TrainingRequest:
    """What is asked for."""

    model_id: str
    seq_id: int
    datums: list[Datum]
    loss_fn: str
    config: Mapping[str, float | str]
    """Arguments of the loss."""
    is_forward_only: bool


def message_of(data: bytes) -> wire.ForwardBackwardRequest:
    """Parse a body.

    Raises:
        InvalidField: it is no such message.
    """
    try:
        return wire.ForwardBackwardRequest.FromString(data)
    except DecodeError as error:
        raise InvalidField('body', 'must be a ForwardBackwardRequest') from error


def request_from_proto(message: wire.ForwardBackwardRequest) -> TrainingRequest:
    """Read a request.

    Raises:
        InvalidField: it is malformed.
    """
    check_count(message.data, MAX_PARTS, 'data')
    room = Room()
    return TrainingRequest(
        model_id=check_model_id(message.model_id, 'model_id'),
        seq_id=check_seq_id(message.seq_id, 'seq_id'),
        datums=[datum_from_proto(datum, f'data[{index}]', room) for index, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        config=_config_from_proto(message),
        is_forward_only=message.forward_only,
    )


def request_from_json(fields: Fields, *, is_forward_only: bool) -> TrainingRequest:
    """Read a request.

    Raises:
        InvalidField: it is malformed.
    """
    name = 'forward_input' if is_forward_only else 'forward_backward_input'
    given = Fields(fields.need(name, mapping), name)
    room = Room()
    datums = given.need('data', items)
    config = given.get('loss_fn_config', mapping, {})
    return TrainingRequest(
        model_id=fields.need('model_id', check_model_id),
        seq_id=fields.need('seq_id', check_seq_id),
        datums=[datum_from_json(datum, f'data[{index}]', room) for index, datum in enumerate(datums)],
        loss_fn=given.need('loss_fn', text),
        config={key: _argument(value, f'loss_fn_config.{key[:100]}') for key, value in config.items()},
        is_forward_only=is_forward_only,
    )


def _config_from_proto(message: wire.ForwardBackwardRequest) -> dict[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    return {
        name: value.text if value.WhichOneof('value') == 'text' else value.number
        for name, value in message.loss_fn_config_v2.items()
    }


def _argument(value: Any, field: str) -> float | str:
    if isinstance(value, str):
        return value
    if type(value) not in (int, float) or abs(value) > 1e300:
        raise InvalidField(field, 'must be a number or a text')
    return float(value)
