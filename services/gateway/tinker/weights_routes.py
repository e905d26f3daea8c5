"""Saves a model's weights, for training, for sampling or to take away, and loads them into a model."""

from datetime import timedelta
from typing import Any

from services.gateway.http.call import HttpCall, Response, Route
from services.gateway.http.fields import flag, items, text, whole
from services.gateway.tinker.bodies import read_body
from services.gateway.tinker.fields import Fields
from services.gateway.tinker.notes import Note, Verb, note_of
from services.gateway.tinker.operations import (
    Operations,
    acknowledged,
    check_model_id,
    check_seq_id,
    metadata_note,
)
from services.gateway.tinker.paths import WeightsKind, WeightsPath, parse_name, parse_path
from services.gateway.tinker.ports import SamplerSaves
from services.gateway.tinker.routes import TRAIN, tinker_route
from services.gateway.tinker.runs import session_of
from services.gateway.tinker.session_routes import labels_of
from services.kit.errors import InvalidField
from services.kit.rpc.fields import duration_to_proto
from twinkle.api.model.v1 import operation_pb2

_TTL_SECONDS = whole(3600, 10 * 366 * 24 * 3600)
_SESSION_SEQ_ID = whole(0, (1 << 31) - 1)
_KINDS = ('snapshot', 'inflight')


class WeightsRoutes:
    """Serves them."""

    def __init__(self, operations: Operations, sampler_saves: SamplerSaves) -> None:
        """Submit `operations`; weights without a name go to `sampler_saves`."""
        self._operations = operations
        self._sampler_saves = sampler_saves

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            tinker_route('save_weights', self._save, access=TRAIN),
            tinker_route('save_weights_for_sampler', self._save_for_sampler, access=TRAIN),
            tinker_route('save_weights_external', self._save_external, access=TRAIN),
        ]

    async def _save(self, call: HttpCall) -> Response:
        fields = await read_body(call, Fields)
        async with self._operations.placed(fields.raw('model_id'), fields.raw('seq_id')):
            return await self._submit_save(fields, WeightsKind.TRAINING, Verb.SAVE_WEIGHTS)

    async def _save_external(self, call: HttpCall) -> Response:
        fields = await read_body(call, Fields)
        async with self._operations.placed(fields.raw('model_id'), fields.raw('seq_id')):
            if fields.get('age_encryption_recipients', items, []):
                problem = 'files are not encrypted here; save without recipients and fetch them over TLS'
                raise InvalidField('age_encryption_recipients', problem)
            fields.need('path', text)
            return await self._submit_save(fields, WeightsKind.EXTERNAL, Verb.SAVE_EXTERNAL)

    async def _save_for_sampler(self, call: HttpCall) -> Response:
        fields = await read_body(call, Fields)
        async with self._operations.placed(fields.raw('model_id'), fields.raw('seq_id')):
            kind = fields.get('kind', text, 'snapshot')
            if kind not in _KINDS:
                raise InvalidField('kind', f'must be one of {", ".join(_KINDS)}')
            if 'path' in fields:
                return await self._submit_save(fields, WeightsKind.SAMPLER, Verb.SAVE_FOR_SAMPLER)
            return await self._publish(fields, is_inflight=kind == 'inflight')

    async def _submit_save(self, fields: Fields, kind: WeightsKind, verb: Verb) -> Response:
        path, operation = save_of(fields, kind)
        note = Note(verb, {'path': str(path), **metadata_note(labels_of(fields, 'user_metadata'))})
        return acknowledged(await self._operations.submit(operation, fields.need('seq_id', check_seq_id), note))

    async def _publish(self, fields: Fields, *, is_inflight: bool) -> Response:
        model, place = fields.need('model_id', check_model_id), fields.need('seq_id', check_seq_id)
        if 'sampling_session_seq_id' not in fields:
            raise InvalidField('path', 'is required, unless sampling_session_seq_id is given')
        session_id = session_of(model)
        handle_id = f'{session_id}:sample:{fields.need("sampling_session_seq_id", _SESSION_SEQ_ID)}'
        # Whoever samples in flight takes newer weights as well, so those of this save need not be kept.
        publish = operation_pb2.PublishVersion(is_pinned=not is_inflight)
        operation = operation_pb2.Operation(adapter_id=model, publish_version=publish)
        # The SDK counts on when it sends a save again: it is the same save, and its sampling session is the first one.
        future = await self._operations.submit(
            operation, place, Note(Verb.PUBLISH, {'sampling_session_id': handle_id}), is_note_free=True
        )
        await self._sampler_saves.attach(
            handle_id=note_of(future).facts['sampling_session_id'],
            session_id=session_id,
            model_id=model,
            future_id=future.future_id,
            is_inflight=is_inflight,
        )
        return acknowledged(future)


def save_of(fields: Fields, kind: WeightsKind) -> tuple[WeightsPath, operation_pb2.Operation]:
    """Return where weights are saved, and the operation that does it.

    Raises:
        InvalidField: a field is wrong.
    """
    run_id, place = fields.need('model_id', check_model_id), fields.need('seq_id', check_seq_id)
    name = fields.get('path', text, f'{place:06d}')
    path = WeightsPath(run_id, kind, parse_name(name, 'path'))
    save = operation_pb2.Save(
        name=path.native_name,
        is_optimizer_included=kind is WeightsKind.TRAINING,
        is_overwrite_allowed=fields.get('overwrite', flag, default=False),
        user_metadata=labels_of(fields, 'user_metadata'),
    )
    if 'ttl_seconds' in fields:
        ttl = timedelta(seconds=fields.need('ttl_seconds', _TTL_SECONDS))
        save.ttl.CopyFrom(duration_to_proto(ttl))
    return path, operation_pb2.Operation(adapter_id=run_id, save=save)


def load_of(fields: Fields) -> tuple[WeightsPath, operation_pb2.Operation]:
    """Return what weights are loaded into a model that is there, and the operation that does it.

    Raises:
        InvalidField: a field is wrong.
    """
    path = training_path(fields)
    load = operation_pb2.Load(
        checkpoint_path=path.native, is_optimizer_included=fields.get('optimizer', flag, default=False)
    )
    return path, operation_pb2.Operation(adapter_id=fields.need('model_id', check_model_id), load=load)


def training_path(fields: Fields) -> WeightsPath:
    """Return the weights that a model is to begin from.

    Raises:
        InvalidField: it is no path, or one of weights for sampling, which know no optimizer.
    """
    path = fields.need('path', parse_path)
    if path.kind is not WeightsKind.TRAINING and fields.get('optimizer', flag, default=False):
        raise InvalidField('path', f'{path.kind} hold no optimizer state; save with save_state')
    return path


def load_note(path: WeightsPath, **facts: Any) -> Note:
    """Return the note of a load."""
    return Note(Verb.LOAD_WEIGHTS, {'path': str(path), **facts})
