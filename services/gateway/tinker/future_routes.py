"""Outcomes of futures: a client asks until there is one, and is held meanwhile so that it need not ask often."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from services.gateway.futures.futures import Futures
from services.gateway.futures.rules import Future, FutureState
from services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from services.gateway.tinker.bodies import read_body, wants_protobuf
from services.gateway.tinker.errors import category_of, text_of
from services.gateway.tinker.fields import Fields, bounded_text
from services.gateway.tinker.notes import Note, note_of
from services.gateway.tinker.routes import ANY_KEY, tinker_route
from services.kit.errors import DomainError, NotBuiltYet

HOLD_SECONDS = 25.0
"""How long a client waits for an answer; it gives up after 45."""
_future_id = bounded_text(1, 128)


@dataclass(frozen=True)
class Outcome:
    """A future that is done, with what came of it."""

    future: Future
    note: Note
    result: bytes
    """The native answer."""
    is_protobuf_wanted: bool


AnswerOf = Callable[[Outcome], Awaitable[Response]]


class FutureRoutes:
    """Serves them."""

    def __init__(
        self,
        futures: Futures,
        answers: Mapping[str, AnswerOf],
        *,
        is_rate_limited: Callable[[str], bool] = lambda _: False,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        """Tell the outcomes of `futures`.

        Args:
            futures: knows them.
            answers: make an answer of what is done, by the verb of its note.
            is_rate_limited: whether a tenant's requests wait until it has paid for the tokens it used.
            hold_seconds: how long a client is held.
        """
        self._is_rate_limited = is_rate_limited
        self._futures = futures
        self._answers = answers
        self._hold_seconds = hold_seconds

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            tinker_route('retrieve_future', self._retrieve, access=ANY_KEY),
            tinker_route('cancel_future', self._cancel, access=ANY_KEY),
        ]

    async def _retrieve(self, call: HttpCall) -> Response:
        future_id = await read_body(call, _wanted)
        future = await self._futures.wait(future_id, seconds=self._hold_seconds)
        if not future.is_finished:
            state = 'paused_rate_limit' if self._is_rate_limited(future.tenant_id) else 'active'
            return JsonResponse({'type': 'try_again', 'request_id': future_id, 'queue_state': state})
        if future.state is FutureState.FAILED and future.error is not None:
            return failed(future.error)
        note = note_of(future)
        if note.verb not in self._answers:
            raise NotBuiltYet(note.verb or future.kind)
        # The answer is made beside the result, and both are here until the client has read it.
        await call.reserve_body(2 * await self._futures.result_bytes(future))
        result = await self._futures.result(future)
        return await self._answers[note.verb](Outcome(future, note, result, wants_protobuf(call)))

    async def _cancel(self, call: HttpCall) -> Response:
        await self._futures.cancel(await read_body(call, _wanted))
        return JsonResponse({'type': 'cancel_future'})


def failed(error: DomainError) -> Response:
    """Return the answer that tells that a future failed, and whose fault it is."""
    return JsonResponse({'error': text_of(error), 'category': category_of(error)})


def _wanted(body: Mapping[str, object]) -> str:
    return Fields(body).need('request_id', _future_id)
