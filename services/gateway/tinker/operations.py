"""Native operations on their way: each is a future in its model's lane, at the place that the client gave it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from services.gateway.futures.executors import REFUSED_KIND, refusal_payload
from services.gateway.futures.futures import Futures
from services.gateway.futures.rules import Future, FutureRequest
from services.gateway.http.call import JsonResponse
from services.gateway.http.fields import whole
from services.gateway.tinker.errors import text_of
from services.gateway.tinker.fields import bounded_text
from services.gateway.tinker.notes import EXECUTE, Note
from services.gateway.tinker.runs import KnownModels, session_of
from services.kit.errors import Disposition, DomainError, InvalidField
from twinkle.api.model.v1 import operation_pb2, training_service_pb2

MAX_SEQ_ID = (1 << 31) - 1
check_model_id = bounded_text(1, 128)
check_seq_id = whole(1, MAX_SEQ_ID)
_NO_PLACE = frozenset({'ADAPTER_NOT_FOUND', 'SESSION_NOT_FOUND'})
"""Reasons of refusals where the model or session does not exist, so that there is no place to use up."""


class Operations:
    """Submits operations on models."""

    def __init__(self, futures: Futures, runs: KnownModels) -> None:
        """Submit to `futures`; `runs` knows the models."""
        self.futures = futures
        self._runs = runs

    async def submit(
        self, operation: operation_pb2.Operation, seq_id: int, note: Note, *, is_note_free: bool = False
    ) -> Future:
        """Accept an operation durably; the same again is the same future.

        Args:
            operation: what to do, on which adapter; it has no number yet.
            seq_id: its place among the model's operations, from 1.
            note: what its answer needs.
            is_note_free: whether a repeat may come with another note; that of the first is kept.

        Raises:
            AdapterNotFound: the caller has no such model.
            SessionFinished: the model's session takes no more.
            InvalidField: the place is taken by another request.
            DomainError: it could not be accepted.
        """
        model_id = operation.adapter_id
        base_model = await self._runs.base_model_of(model_id)
        await self._runs.check_open_for(model_id)
        # The operation waits for a place in the trainer's queue: it was accepted already.
        request = training_service_pb2.ExecuteRequest(operation=operation, is_waiting_allowed=True)
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
    async def placed(self, model_id: object, seq_id: object) -> AsyncIterator[None]:
        """Read and submit an operation in this block. Where its content is refused, its place is used up all the same.

        A client counts on: what it sends next would wait for the operation that never came.

        Args:
            model_id: as the client sent it, whatever it is.
            seq_id: the same.
        """
        try:
            yield
        except DomainError as error:
            if error.disposition is Disposition.REFUSED and error.reason not in _NO_PLACE:
                with suppress(DomainError):
                    await self._use_up(model_id, seq_id, error)
            raise

    async def _use_up(self, model: object, seq: object, error: DomainError) -> None:
        """Take the place of an operation that was refused.

        Raises:
            DomainError: there is no such place, or it is taken.
        """
        model_id, place = check_model_id(model, 'model_id'), check_seq_id(seq, 'seq_id')
        base_model = await self._runs.base_model_of(model_id)
        await self._runs.check_open_for(model_id)
        order = FutureRequest(
            kind=REFUSED_KIND,
            key=f'{model_id}:{place}',
            payload=refusal_payload('request', text_of(error)),
            session_id=session_of(model_id),
            lane=model_id,
            position=place,
            base_model=base_model,
        )
        await self.futures.submit(order)


def acknowledged(future: Future) -> JsonResponse:
    """Return the answer that tells a client the id of its future."""
    model = {'model_id': future.lane} if future.lane else {}
    return JsonResponse({'request_id': future.future_id, **model})


def metadata_note(labels: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return labels of a save as facts of its note.

    Raises:
        InvalidField: they are too long to be kept.
    """
    if sum(len(name) + len(value) for name, value in labels.items()) > 2048:
        raise InvalidField('user_metadata', 'must have at most 2048 characters together')
    return {'user_metadata': labels} if labels else {}
