"""Forward, backward and step."""

import asyncio
import math

from services.gateway.http.call import HttpCall, Response, Route
from services.gateway.http.fields import number, text
from services.gateway.tinker.base_models import BaseModel, BaseModels
from services.gateway.tinker.bodies import is_protobuf, read_body, read_message
from services.gateway.tinker.features import FeatureReader, features_of
from services.gateway.tinker.fields import Fields
from services.gateway.tinker.losses import loss_config, rule_of
from services.gateway.tinker.notes import Note, Verb
from services.gateway.tinker.operations import Operations, acknowledged, check_model_id, check_seq_id
from services.gateway.tinker.routes import TRAIN, tinker_route
from services.gateway.tinker.runs import KnownModels
from services.gateway.tinker.training_request import (
    TrainingRequest,
    message_of,
    request_from_json,
    request_from_proto,
)
from services.kit.errors import InvalidField
from services.kit.rpc.json_values import struct_of
from twinkle.api.model.v1 import operation_pb2

ADAM = {'beta1': 0.9, 'beta2': 0.95, 'eps': 1e-12, 'weight_decay': 0.0}
"""What Tinker's optimizer has where a client says nothing."""
LEARNING_RATE = 1e-4
_rate = number(0, 1e6)
_beta = number(0, 1, is_least_excluded=False)


class TrainingRoutes:
    """Serves them."""

    def __init__(self, operations: Operations, runs: KnownModels, base_models: BaseModels, *, body_bytes: int) -> None:
        """Submit `operations`; bodies may have `body_bytes` once they are decompressed."""
        self._operations = operations
        self._runs = runs
        self._base_models = base_models
        self._body_bytes = body_bytes

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            tinker_route('forward_backward', self._forward_backward, access=TRAIN),
            tinker_route('forward', self._forward, access=TRAIN),
            tinker_route('optim_step', self._optim_step, access=TRAIN),
        ]

    async def _forward_backward(self, call: HttpCall) -> Response:
        return await self._pass(call, is_forward_only=False)

    async def _forward(self, call: HttpCall) -> Response:
        return await self._pass(call, is_forward_only=True)

    async def _pass(self, call: HttpCall, *, is_forward_only: bool) -> Response:
        if is_protobuf(call):
            message = await read_message(call, message_of, limit_bytes=self._body_bytes)
            async with self._operations.placed(message.model_id, message.seq_id):
                return await self._submit(await asyncio.to_thread(request_from_proto, message))
        fields = await read_body(call, Fields, limit_bytes=self._body_bytes)
        async with self._operations.placed(fields.raw('model_id'), fields.raw('seq_id')):
            return await self._submit(
                await asyncio.to_thread(request_from_json, fields, is_forward_only=is_forward_only)
            )

    async def _submit(self, request: TrainingRequest) -> Response:
        model = await self._base_models.find(await self._runs.base_model_of(request.model_id))
        operation = await asyncio.to_thread(pass_of, request, model)
        verb = Verb.FORWARD if request.is_forward_only else Verb.FORWARD_BACKWARD
        return acknowledged(await self._operations.submit(operation, request.seq_id, Note(verb)))

    async def _optim_step(self, call: HttpCall) -> Response:
        fields = await read_body(call, Fields)
        async with self._operations.placed(fields.raw('model_id'), fields.raw('seq_id')):
            operation, place = step_of(fields)
            return acknowledged(await self._operations.submit(operation, place, Note(Verb.OPTIM_STEP)))


def pass_of(request: TrainingRequest, base_model: BaseModel | None) -> operation_pb2.Operation:
    """Return the native pass; a large batch takes long.

    Args:
        request: what is asked for.
        base_model: what the model adapts; None: that is not known yet, and the trainer has to check.

    Raises:
        InvalidField: a datum or an argument is wrong.
    """
    reader = FeatureReader(
        rule_of(request.loss_fn),
        options=request.config,
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


def step_of(fields: Fields) -> tuple[operation_pb2.Operation, int]:
    """Return the native step, and its place.

    Raises:
        InvalidField: an argument is wrong, or of another optimizer than AdamW.
    """
    given = fields.part('optimizer_params' if 'optimizer_params' in fields else 'adam_params')
    kind = given.get('type', text, 'adamw')
    if kind not in {'adamw', 'adam'}:
        raise InvalidField('optimizer_params.type', f'models here are trained with adamw, not {kind[:100]!r}')
    adam = {name: given.get(name, _beta if 'beta' in name else _rate, default) for name, default in ADAM.items()}
    for name in ('beta1', 'beta2'):
        if adam[name] >= 1:
            raise InvalidField(given.path_of(name), 'must be below 1')
    limit = given.get('grad_clip_norm', _rate, 0.0)
    options = {'betas': [adam['beta1'], adam['beta2']], 'eps': adam['eps'], 'weight_decay': adam['weight_decay']}
    step = operation_pb2.ClipGradAndStep(
        max_grad_norm=limit or math.inf,
        learning_rate=given.get('learning_rate', _rate, LEARNING_RATE),
        optimizer_options=struct_of(options),
    )
    operation = operation_pb2.Operation(adapter_id=fields.need('model_id', check_model_id), clip_grad_and_step=step)
    return operation, fields.need('seq_id', check_seq_id)
