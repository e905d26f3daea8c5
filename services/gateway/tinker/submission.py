"""Submits operations on models. Each operation is a future with a position in the lane of its model."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from twinkle.api.model.v1 import operation_pb2, training_service_pb2
from twinkle_services.gateway.errors import FutureExpired, FutureNotFound, SessionFinished, SessionNotFound
from twinkle_services.gateway.fleet.upstreams import GrpcLookups
from twinkle_services.gateway.futures.executors import refusal_payload
from twinkle_services.gateway.futures.futures import Futures
from twinkle_services.gateway.futures.rules import (
    EXECUTE_KIND,
    REFUSED_KIND,
    Future,
    FutureRequest,
    FutureState,
    future_id_of,
)
from twinkle_services.gateway.http.call import HttpCall, JsonResponse
from twinkle_services.gateway.http.validation import read_model
from twinkle_services.gateway.sessions.rules import SessionState
from twinkle_services.gateway.sessions.sessions import Sessions
from twinkle_services.gateway.tinker.bodies import OperationBody, position_in
from twinkle_services.gateway.tinker.routes import text_of
from twinkle_services.gateway.tinker.wire import tinker_pb2 as wire
from twinkle_services.kit.errors import AdapterNotFound, Disposition, DomainError
from twinkle_services.kit.rpc.context import current_caller

Body = TypeVar('Body', wire.ForwardBackwardRequest, dict[str, Any])
_CACHED_NAMES = 4096
_SEPARATOR = ':train:'
_NO_LANE = frozenset({'ADAPTER_NOT_FOUND', 'ADAPTER_EXPIRED', 'SESSION_NOT_FOUND'})
"""Reasons of errors after which the position stays unused, because the model has no lane."""


class Verb(StrEnum):
    """Kind of a client's request."""

    CREATE_MODEL = 'create_model'
    LOAD_MODEL = 'load_model'
    """Create a model from saved weights."""
    FORWARD = 'forward'
    FORWARD_BACKWARD = 'forward_backward'
    OPTIM_STEP = 'optim_step'
    SAVE_WEIGHTS = 'save_weights'
    SAVE_FOR_SAMPLER = 'save_weights_for_sampler'
    PUBLISH = 'publish'
    """Save weights without a name, for a sampling session."""
    SAVE_EXTERNAL = 'save_weights_external'
    LOAD_WEIGHTS = 'load_weights'
    UNLOAD_MODEL = 'unload_model'
    SAMPLE = 'sample'


@dataclass(frozen=True)
class FutureNote:
    """Facts stored with a future, from which its response is built after the request is deleted."""

    verb: str
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further facts, as short JSON values."""

    def __str__(self) -> str:
        return json.dumps({'verb': self.verb, **self.facts}, separators=(',', ':'), sort_keys=True)


def note_of(future: Future) -> FutureNote:
    """Return the note of a future; its verb is empty for futures of other APIs."""
    try:
        facts = json.loads(future.note)
    except ValueError:
        return FutureNote('')
    return FutureNote(str(facts.pop('verb', '')), facts) if isinstance(facts, dict) else FutureNote('')  # pyright: ignore[reportUnknownArgumentType,reportUnknownMemberType]


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """Return the id of a session's model, which is also the id of its adapter."""
    return f'{session_id}{_SEPARATOR}{model_seq_id}'


def session_of(model_id: str) -> str:
    """Return the id of a model's session; empty for adapters that were created through another API."""
    return model_id.rpartition(_SEPARATOR)[0]


def creation_key(model_id: str) -> str:
    """Return the key of the future that creates a model."""
    return f'{model_id}:0'


class Operations:
    """Submits operations on models, after it has looked up the base model and the session of a model.

    Concurrency: all methods must be called from the event loop; they act for the current caller.
    """

    def __init__(self, futures: Futures, lookups: GrpcLookups, sessions: Sessions) -> None:
        self.futures = futures
        self._lookups = lookups
        self._sessions = sessions
        self._names: OrderedDict[tuple[str, str], str] = OrderedDict()
        """Base model by tenant and model."""

    async def base_model_of(self, model_id: str) -> str:
        """Return the name of a model's base model; empty if the request that creates the model did not record it.

        Raises:
            AdapterNotFound: the creation of the model failed.
            DomainError: the caller has no such model (ADAPTER_NOT_FOUND), or the lookup failed.
        """
        key = (current_caller().tenant_id, model_id)
        name = self._names.get(key) or await self._look_up(model_id)
        if name:
            self._names[key] = name
            self._names.move_to_end(key)
        if len(self._names) > _CACHED_NAMES:
            self._names.popitem(last=False)
        return name

    async def check_session(self, session_id: str) -> None:
        """Check that a session is not finished; expired sessions still accept work.

        Raises:
            SessionNotFound: the caller has no such session.
            SessionFinished: the client has finished the session.
        """
        session = await self._sessions.get(current_caller(), session_id)
        if session.state is SessionState.FINISHED:
            raise SessionFinished(session_id)

    async def check_session_of(self, model_id: str) -> None:
        """Check that the session of a model accepts work; a model without a session always does.

        Raises:
            SessionFinished: the client has finished the session.
        """
        with suppress(SessionNotFound):
            await self.check_session(session_of(model_id))

    async def submit(
        self, operation: operation_pb2.Operation, seq_id: int, note: FutureNote, *, is_note_free: bool = False
    ) -> Future:
        """Store an operation durably; a repeated request returns the same future.

        Args:
            operation: operation without a sequence number.
            seq_id: position among the model's operations, from 1.
            is_note_free: whether a repeated request may have a different note; the first note is stored.

        Raises:
            SessionFinished: the model's session is finished.
            RequestIdReused: another request has the position.
            DomainError: the caller has no such model (ADAPTER_NOT_FOUND), or the operation was not accepted.
        """
        # The model service may delay the operation, because the gateway has already accepted it.
        request = training_service_pb2.ExecuteRequest(operation=operation, is_waiting_allowed=True)
        payload = await asyncio.to_thread(request.SerializeToString, deterministic=True)
        pending = await self._pending(operation.adapter_id, seq_id, kind=EXECUTE_KIND, payload=payload)
        return await self.futures.submit(replace(pending, note=str(note), is_note_free=is_note_free))

    @asynccontextmanager
    async def positioned(self, call: HttpCall, reading: Awaitable[Body]) -> AsyncIterator[Body]:
        """Read an operation, which the block validates and submits. If it is refused, submit a future that fails.

        Without that future, later operations would wait for the missing position, because clients number operations
        regardless of refusals. If `reading` refuses the body of `call`, the position is looked up in the first and last
        bytes of the body.
        """
        body = None
        try:
            body = await reading
            yield body
        except DomainError as error:
            if error.disposition is Disposition.REFUSED and error.reason not in _NO_LANE:
                with suppress(DomainError):
                    position = await position_in(call) if body is None else _position_of(body)
                    await self._submit_refusal(*position, error)
            raise

    async def _submit_refusal(self, model_id: Any, seq_id: Any, error: DomainError) -> None:
        given = read_model(OperationBody, {'model_id': model_id, 'seq_id': seq_id})
        payload = refusal_payload('request', text_of(error))
        await self.futures.submit(await self._pending(given.model_id, given.seq_id, kind=REFUSED_KIND, payload=payload))

    async def _look_up(self, model_id: str) -> str:
        future_id = future_id_of(current_caller().tenant_id, creation_key(model_id))
        try:
            creation = await self.futures.wait(future_id, seconds=0)
        except (FutureNotFound, FutureExpired):
            return (await self._lookups.adapter(model_id)).base_model
        if creation.state is FutureState.FAILED:
            raise AdapterNotFound(model_id)
        return str(note_of(creation).facts.get('base_model', ''))

    async def _pending(self, model_id: str, seq_id: int, *, kind: str, payload: bytes) -> FutureRequest:
        """Return the request for a future at a position of a model, if the model accepts operations."""
        base_model = await self.base_model_of(model_id)
        await self.check_session_of(model_id)
        return FutureRequest(
            kind=kind,
            key=f'{model_id}:{seq_id}',
            payload=payload,
            session_id=session_of(model_id),
            lane=model_id,
            position=seq_id,
            base_model=base_model,
        )


def _position_of(body: wire.ForwardBackwardRequest | dict[str, Any]) -> tuple[Any, Any]:
    return (body.get('model_id'), body.get('seq_id')) if isinstance(body, dict) else (body.model_id, body.seq_id)


def acknowledged(future: Future) -> JsonResponse:
    """Return the response with the id of a future."""
    model = {'model_id': future.lane} if future.lane else {}
    return JsonResponse({'request_id': future.future_id, **model})
