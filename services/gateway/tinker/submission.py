"""Submits operations on models: each operation is a future at its position in its model's lane."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

from services.gateway.errors import FutureExpired, FutureNotFound, SessionFinished, SessionNotFound
from services.gateway.futures.executors import REFUSED_KIND, refusal_payload
from services.gateway.futures.futures import Futures
from services.gateway.futures.rules import Future, FutureRequest, FutureState, future_id_of
from services.gateway.http.call import HttpCall, JsonResponse
from services.gateway.http.validation import read_model
from services.gateway.sessions.rules import SessionState
from services.gateway.sessions.sessions import Sessions
from services.gateway.tinker.bodies import OperationBody, position_in
from services.gateway.tinker.futures import EXECUTE, FutureNote, note_of
from services.gateway.tinker.routes import text_of
from services.gateway.tinker.wire import tinker_pb2 as wire
from services.kit.errors import AdapterNotFound, Disposition, DomainError
from services.kit.rpc.context import current_caller
from twinkle.api.model.v1 import adapter_pb2, operation_pb2, training_service_pb2

Body = TypeVar('Body', wire.ForwardBackwardRequest, dict[str, Any])
_CACHED_NAMES = 4096
_SEPARATOR = ':train:'
_NO_LANE = frozenset({'ADAPTER_NOT_FOUND', 'ADAPTER_EXPIRED', 'SESSION_NOT_FOUND'})
"""Error reasons after which the lane does not exist, so that no position has to be used."""


class Lookups(Protocol):
    """Lookups at other services on behalf of the current caller.

    All methods raise the other service's error, or ServiceUnreachable.
    """

    async def adapter(self, adapter_id: str) -> bytes:
        """Return an adapter as model.v1.Adapter."""
        ...

    async def checkpoint(self, checkpoint_path: str) -> bytes:
        """Return a checkpoint, by our path, as checkpoint.v1.Checkpoint."""
        ...


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """Return the id of a session's model, which is also the id of its adapter."""
    return f'{session_id}{_SEPARATOR}{model_seq_id}'


def session_of(model_id: str) -> str:
    """Return the session of a model; empty for adapters that were created through another API."""
    return model_id.rpartition(_SEPARATOR)[0]


def creation_key(model_id: str) -> str:
    """Return the key of the future that creates a model."""
    return f'{model_id}:0'


class KnownModels:
    """Base models and session states of models, looked up before an operation is queued.

    Concurrency: All methods must be called from the event loop; they act for the current caller.
    """

    def __init__(self, futures: Futures, lookups: Lookups, sessions: Sessions) -> None:
        self._futures = futures
        self._lookups = lookups
        self._sessions = sessions
        self._names: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def base_model_of(self, model_id: str) -> str:
        """Return the name of a model's base model; empty while the model is still being created from saved weights.

        Raises:
            AdapterNotFound: The caller has no such model.
            DomainError: The lookup failed.
        """
        key = (current_caller().tenant_id, model_id)
        if key not in self._names:
            name = await self._look_up(model_id)
            if name:
                self._names[key] = name
            if len(self._names) > _CACHED_NAMES:
                self._names.popitem(last=False)
            return name
        self._names.move_to_end(key)
        return self._names[key]

    async def check_session(self, session_id: str) -> None:
        """Check that a session accepts work, which includes expired sessions.

        Raises:
            SessionNotFound: The caller has no such session.
            SessionFinished: The client has finished the session.
        """
        session = await self._sessions.get(current_caller(), session_id)
        if session.state is SessionState.FINISHED:
            raise SessionFinished(session_id)

    async def check_session_of(self, model_id: str) -> None:
        """Check that the session of a model accepts work; a model without a session always does.

        Raises:
            SessionFinished: The client has finished the session.
        """
        try:
            await self.check_session(session_of(model_id))
        except SessionNotFound:
            return

    async def _look_up(self, model_id: str) -> str:
        future_id = future_id_of(current_caller().tenant_id, creation_key(model_id))
        try:
            creation = await self._futures.wait(future_id, seconds=0)
        except (FutureNotFound, FutureExpired):
            return adapter_pb2.Adapter.FromString(await self._lookups.adapter(model_id)).base_model
        if creation.state is FutureState.FAILED:
            raise AdapterNotFound(model_id)
        return str(note_of(creation).facts.get('base_model', ''))


class Operations:
    """Submits operations on models."""

    def __init__(self, futures: Futures, known: KnownModels) -> None:
        self.futures = futures
        self._known = known

    async def submit(
        self, operation: operation_pb2.Operation, seq_id: int, note: FutureNote, *, is_note_free: bool = False
    ) -> Future:
        """Accept an operation durably; resubmitting it returns the same future.

        Args:
            operation: Operation without a sequence number.
            seq_id: Position among the model's operations, from 1.
            note: Facts for its response.
            is_note_free: Whether a repeated request may have another note; the first note is stored.

        Raises:
            AdapterNotFound: The caller has no such model.
            SessionFinished: The model's session is finished.
            RequestIdReused: Another request has the position.
            DomainError: The operation was not accepted.
        """
        # The trainer may delay the operation, because it has already been accepted.
        request = training_service_pb2.ExecuteRequest(operation=operation, is_waiting_allowed=True)
        model_id = operation.adapter_id
        base_model = await self._known.base_model_of(model_id)
        await self._known.check_session_of(model_id)
        return await self.futures.submit(
            FutureRequest(
                kind=EXECUTE,
                key=f'{model_id}:{seq_id}',
                payload=await asyncio.to_thread(request.SerializeToString, deterministic=True),
                session_id=session_of(model_id),
                lane=model_id,
                position=seq_id,
                note=str(note),
                is_note_free=is_note_free,
                base_model=base_model,
            )
        )

    @asynccontextmanager
    async def positioned(self, call: HttpCall, reading: Awaitable[Body]) -> AsyncIterator[Body]:
        """Read an operation, and validate and submit it in this block; if it is refused, its position is still used.

        Otherwise later operations, which clients number regardless of a refusal, would wait for it forever.

        Args:
            call: Call of the operation; its position is searched in the body if that cannot be parsed.
            reading: Reads the unvalidated body.
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
        operation = read_model(OperationBody, {'model_id': model_id, 'seq_id': seq_id})
        base_model = await self._known.base_model_of(operation.model_id)
        await self._known.check_session_of(operation.model_id)
        request = FutureRequest(
            kind=REFUSED_KIND,
            key=f'{operation.model_id}:{operation.seq_id}',
            payload=refusal_payload('request', text_of(error)),
            session_id=session_of(operation.model_id),
            lane=operation.model_id,
            position=operation.seq_id,
            base_model=base_model,
        )
        await self.futures.submit(request)


def _position_of(body: wire.ForwardBackwardRequest | dict[str, Any]) -> tuple[Any, Any]:
    return (body.get('model_id'), body.get('seq_id')) if isinstance(body, dict) else (body.model_id, body.seq_id)


def acknowledged(future: Future) -> JsonResponse:
    """Return the response with the id of a future."""
    model = {'model_id': future.lane} if future.lane else {}
    return JsonResponse({'request_id': future.future_id, **model})
