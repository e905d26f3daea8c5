"""Routes for forward passes, backward passes and optimizer steps, in protobuf or in the JSON of SDKs up to 0.24.

Functions raise InvalidField with the path of the first wrong field.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from google.protobuf.message import DecodeError
from pydantic import Field

from twinkle.api.model.v1 import operation_pb2, training_config_pb2
from twinkle_services.gateway.http.call import HttpCall, Response, Route
from twinkle_services.gateway.http.validation import read_model
from twinkle_services.gateway.tinker.arrays import ElementBudget
from twinkle_services.gateway.tinker.base_models import BaseModel, BaseModels
from twinkle_services.gateway.tinker.bodies import (
    OperationBody,
    OptimizerKind,
    TinkerModel,
    is_protobuf,
    read_message,
    read_object,
)
from twinkle_services.gateway.tinker.datums import (
    MAX_PARTS,
    Datum,
    FeatureReader,
    check_count,
    datum_from_json,
    datum_from_proto,
    features_of,
    loss_config,
    rule_of,
)
from twinkle_services.gateway.tinker.routes import TRAIN, tinker_route
from twinkle_services.gateway.tinker.submission import FutureNote, Operations, Verb, acknowledged
from twinkle_services.gateway.tinker.wire import tinker_pb2 as wire
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.json_values import struct_of
from twinkle_services.kit.rpc.message_elements import check_elements

_Rate = Annotated[float, Field(ge=0, le=1e6)]
_Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamParams(TinkerModel):
    """Arguments of an optimizer step, with the defaults of Tinker's optimizer."""

    type: OptimizerKind = 'adamw'
    learning_rate: _Rate = 1e-4
    beta1: _Beta = 0.9
    beta2: _Beta = 0.95
    eps: _Rate = 1e-12
    weight_decay: _Rate = 0.0
    grad_clip_norm: _Rate = 0.0
    """0 disables clipping."""

    def options(self) -> dict[str, Any]:
        return {'betas': [self.beta1, self.beta2], 'eps': self.eps, 'weight_decay': self.weight_decay}


def default_optimizer() -> training_config_pb2.OptimizerConfig:
    """Return the optimizer of a new model."""
    adam = AdamParams()
    options = struct_of(adam.options())
    return training_config_pb2.OptimizerConfig(name='AdamW', learning_rate=adam.learning_rate, options=options)


class PassInput(TinkerModel):
    """Input of a pass in JSON."""

    data: list[Any]
    """Examples, validated one at a time."""
    loss_fn: str
    loss_fn_config: dict[str, Any] = Field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class PassRequest:
    """Forward or forward-backward request."""

    model_id: str
    seq_id: int
    datums: list[Datum]
    loss_fn: str
    config: Mapping[str, float | str]
    """Options of the loss."""
    is_forward_only: bool


def parse_message(data: bytes) -> wire.ForwardBackwardRequest:
    check_elements(data, wire.ForwardBackwardRequest.DESCRIPTOR, 'body')
    try:
        return wire.ForwardBackwardRequest.FromString(data)
    except DecodeError as error:
        raise InvalidField('body', 'must be a ForwardBackwardRequest') from error


def request_from_proto(message: wire.ForwardBackwardRequest) -> PassRequest:
    check_count(message.data, MAX_PARTS, 'data')
    operation = read_model(OperationBody, {'model_id': message.model_id, 'seq_id': message.seq_id})
    budget = ElementBudget()
    return PassRequest(
        model_id=operation.model_id,
        seq_id=operation.seq_id,
        datums=[datum_from_proto(datum, f'data[{index}]', budget) for index, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        config=_proto_config(message),
        is_forward_only=message.forward_only,
    )


def request_from_json(body: dict[str, Any], *, is_forward_only: bool) -> PassRequest:
    name = 'forward_input' if is_forward_only else 'forward_backward_input'
    if body.get(name) is None:
        raise InvalidField(name, 'is required')
    operation = read_model(OperationBody, body)
    given = read_model(PassInput, body[name], path=name)
    budget = ElementBudget()
    return PassRequest(
        model_id=operation.model_id,
        seq_id=operation.seq_id,
        datums=[datum_from_json(datum, f'data[{index}]', budget) for index, datum in enumerate(given.data)],
        loss_fn=given.loss_fn,
        config={key: _option(value, f'loss_fn_config.{key[:100]}') for key, value in given.loss_fn_config.items()},
        is_forward_only=is_forward_only,
    )


def _proto_config(message: wire.ForwardBackwardRequest) -> dict[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    return {
        name: value.text if value.WhichOneof('value') == 'text' else value.number
        for name, value in message.loss_fn_config_v2.items()
    }


def _option(value: Any, field: str) -> float | str:
    if isinstance(value, str):
        return value
    if type(value) not in (int, float) or abs(value) > 1e300:
        raise InvalidField(field, 'must be a number or a string')
    return float(value)


class TrainingRoutes:
    """Routes of passes and optimizer steps."""

    def __init__(self, operations: Operations, base_models: BaseModels, *, body_bytes: int) -> None:
        """Create the routes; the decompressed body of a pass may have at most `body_bytes` bytes."""
        self._operations = operations
        self._base_models = base_models
        self._body_bytes = body_bytes

    def routes(self) -> list[Route]:
        return [
            tinker_route('forward_backward', partial(self._pass, is_forward_only=False), access=TRAIN),
            tinker_route('forward', partial(self._pass, is_forward_only=True), access=TRAIN),
            tinker_route('optim_step', self._optim_step, access=TRAIN),
        ]

    async def _pass(self, call: HttpCall, *, is_forward_only: bool) -> Response:
        if is_protobuf(call):
            reading = read_message(call, parse_message, limit_bytes=self._body_bytes)
            async with self._operations.positioned(call, reading) as message:
                return await self._submit(await asyncio.to_thread(request_from_proto, message))
        async with self._operations.positioned(call, read_object(call, limit_bytes=self._body_bytes)) as body:
            return await self._submit(await asyncio.to_thread(request_from_json, body, is_forward_only=is_forward_only))

    async def _submit(self, request: PassRequest) -> Response:
        model = await self._base_models.find(await self._operations.base_model_of(request.model_id))
        operation = await asyncio.to_thread(pass_of, request, model)
        verb = Verb.FORWARD if request.is_forward_only else Verb.FORWARD_BACKWARD
        return acknowledged(await self._operations.submit(operation, request.seq_id, FutureNote(verb)))

    async def _optim_step(self, call: HttpCall) -> Response:
        async with self._operations.positioned(call, read_object(call)) as body:
            given = read_model(OperationBody, body)
            # `optimizer_params` is the newer name.
            name = 'adam_params' if body.get('optimizer_params') is None else 'optimizer_params'
            adam = AdamParams() if body.get(name) is None else read_model(AdamParams, body[name], path=name)
            step = operation_pb2.ClipGradAndStep(
                max_grad_norm=adam.grad_clip_norm or math.inf,
                learning_rate=adam.learning_rate,
                optimizer_options=struct_of(adam.options()),
            )
            operation = operation_pb2.Operation(adapter_id=given.model_id, clip_grad_and_step=step)
            return acknowledged(await self._operations.submit(operation, given.seq_id, FutureNote(Verb.OPTIM_STEP)))


def pass_of(request: PassRequest, base_model: BaseModel | None) -> operation_pb2.Operation:
    """Return the native operation. Without a `base_model`, only the model service checks the limits of the model."""
    reader = FeatureReader(
        rule_of(request.loss_fn),
        vocabulary_size=base_model.vocabulary_size if base_model else 0,
        context_tokens=base_model.context_tokens if base_model else 0,
    )
    batch = operation_pb2.Batch(features=features_of(request.datums, reader))
    is_wide = request.datums[0].inputs['target_tokens'].ndim == 2
    loss = loss_config(request.loss_fn, request.config, is_wide=is_wide)
    if request.is_forward_only:
        forward = operation_pb2.ForwardOnly(batch=batch, loss=loss)
        return operation_pb2.Operation(adapter_id=request.model_id, forward_only=forward)
    both = operation_pb2.ForwardBackward(batch=batch, loss=loss)
    return operation_pb2.Operation(adapter_id=request.model_id, forward_backward=both)
