"""Routes that save a model's weights for training, for sampling, or as external files.

Functions raise InvalidField with the path of the first wrong field.
"""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import Field

from twinkle.api.model.v1 import operation_pb2
from twinkle_services.gateway.catalogue.paths import WeightsKind, WeightsPath, parse_name
from twinkle_services.gateway.http.call import HttpCall, Response, Route
from twinkle_services.gateway.http.validation import read_model
from twinkle_services.gateway.sampling.rules import HandleRequest
from twinkle_services.gateway.tinker.bodies import Counter, Labels, OperationBody, TinkerModel, read_object
from twinkle_services.gateway.tinker.routes import TRAIN, tinker_route
from twinkle_services.gateway.tinker.submission import FutureNote, Operations, Verb, acknowledged, note_of, session_of
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.fields import duration_to_proto

_MAX_NOTE_LABELS = 2048
"""Maximum number of characters of all labels that are stored with a future."""


class SaveBody(OperationBody):
    """Body of every save."""

    path: str | None = None
    """Name of the weights; if absent, it is derived from the position."""
    overwrite: bool = False
    user_metadata: Labels = Field(default_factory=dict[str, str])
    ttl_seconds: Annotated[int, Field(ge=3600, le=10 * 366 * 24 * 3600)] | None = None


class SaveExternalBody(SaveBody):
    """Body of `save_weights_external`."""

    age_encryption_recipients: list[Any] = Field(default_factory=list[Any])


class SamplerKind(TinkerModel):
    """Kind of weights for sampling."""

    kind: Literal['snapshot', 'inflight'] = 'snapshot'


class PublishBody(OperationBody, SamplerKind):
    """Body of `save_weights_for_sampler` without a path."""

    sampling_session_seq_id: Counter | None = None


class WeightsRoutes:
    """Routes that save weights."""

    def __init__(self, operations: Operations, *, open_handle: Callable[[HandleRequest], Awaitable[object]]) -> None:
        """Create the routes; `open_handle` opens the sampling session of weights without a name and is idempotent."""
        self._operations = operations
        self._open_handle = open_handle

    def routes(self) -> list[Route]:
        return [
            tinker_route('save_weights', self._save, access=TRAIN),
            tinker_route('save_weights_for_sampler', self._save_for_sampler, access=TRAIN),
            tinker_route('save_weights_external', self._save_external, access=TRAIN),
        ]

    async def _save(self, call: HttpCall) -> Response:
        async with self._operations.positioned(call, read_object(call)) as body:
            return await self._submit(read_model(SaveBody, body), WeightsKind.TRAINING, Verb.SAVE_WEIGHTS)

    async def _save_external(self, call: HttpCall) -> Response:
        async with self._operations.positioned(call, read_object(call)) as body:
            given = read_model(SaveExternalBody, body)
            if given.age_encryption_recipients:
                problem = 'must be empty; files are not encrypted here, so fetch them over TLS'
                raise InvalidField('age_encryption_recipients', problem)
            if given.path is None:
                raise InvalidField('path', 'is required')
            return await self._submit(given, WeightsKind.EXTERNAL, Verb.SAVE_EXTERNAL)

    async def _save_for_sampler(self, call: HttpCall) -> Response:
        async with self._operations.positioned(call, read_object(call)) as body:
            if body.get('path') is None:
                return await self._publish(read_model(PublishBody, body))
            read_model(SamplerKind, body)
            return await self._submit(read_model(SaveBody, body), WeightsKind.SAMPLER, Verb.SAVE_FOR_SAMPLER)

    async def _submit(self, given: SaveBody, kind: WeightsKind, verb: Verb) -> Response:
        path, operation = save_of(given, kind)
        labels = given.user_metadata
        if sum(len(name) + len(value) for name, value in labels.items()) > _MAX_NOTE_LABELS:
            raise InvalidField('user_metadata', f'must have at most {_MAX_NOTE_LABELS} characters in total')
        note = FutureNote(verb, {'path': str(path), **({'user_metadata': labels} if labels else {})})
        return acknowledged(await self._operations.submit(operation, given.seq_id, note))

    async def _publish(self, given: PublishBody) -> Response:
        if given.sampling_session_seq_id is None:
            raise InvalidField('path', 'is required, unless sampling_session_seq_id is given')
        is_inflight, session_id = given.kind == 'inflight', session_of(given.model_id)
        # An inflight sampling session switches to newer weights, so the version of this save need not be pinned.
        publish = operation_pb2.PublishVersion(is_pinned=not is_inflight)
        operation = operation_pb2.Operation(adapter_id=given.model_id, publish_version=publish)
        note = FutureNote(Verb.PUBLISH, {'sampling_session_id': f'{session_id}:sample:{given.sampling_session_seq_id}'})
        # The SDK increments the counter when it resends a save, which still belongs to the first sampling session.
        future = await self._operations.submit(operation, given.seq_id, note, is_note_free=True)
        await self._open_handle(
            HandleRequest(
                handle_id=note_of(future).facts['sampling_session_id'],
                session_id=session_id,
                base_model=await self._operations.base_model_of(given.model_id),
                adapter_id=given.model_id,
                future_id=future.future_id,
                is_inflight=is_inflight,
            )
        )
        return acknowledged(future)


def save_of(given: SaveBody, kind: WeightsKind) -> tuple[WeightsPath, operation_pb2.Operation]:
    """Return the path of the saved weights, and the operation that saves them."""
    name = f'{given.seq_id:06d}' if given.path is None else given.path
    path = WeightsPath(given.model_id, kind, parse_name(name, 'path'))
    save = operation_pb2.Save(
        name=path.native_name,
        is_optimizer_included=kind is WeightsKind.TRAINING,
        is_overwrite_allowed=given.overwrite,
        user_metadata=given.user_metadata,
    )
    if given.ttl_seconds is not None:
        save.ttl.CopyFrom(duration_to_proto(timedelta(seconds=given.ttl_seconds)))
    return path, operation_pb2.Operation(adapter_id=given.model_id, save=save)
