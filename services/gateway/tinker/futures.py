"""Routes that clients poll for the outcomes of futures. Each call waits for an outcome, so that clients poll rarely."""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from twinkle_services.gateway.futures.futures import Futures
from twinkle_services.gateway.futures.rules import Future, FutureState
from twinkle_services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from twinkle_services.gateway.tinker.bodies import TinkerModel, accepts_protobuf, read_body
from twinkle_services.gateway.tinker.routes import ANY_KEY, category_of, text_of, tinker_route
from twinkle_services.kit.errors import NotBuiltYet

WAIT_SECONDS = 25.0
"""Maximum number of seconds that a poll waits for an outcome; clients time out after 45 s."""


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


@dataclass(frozen=True)
class Outcome:
    """Result of a finished future."""

    future: Future
    note: FutureNote
    result: bytes
    """Encoded native response."""
    is_protobuf_accepted: bool


ResultFormat = Callable[[Outcome], Awaitable[Response]]
"""Builds the response for an outcome."""


class FutureBody(TinkerModel):
    """Body that names a future."""

    request_id: Annotated[str, Field(min_length=1, max_length=128)]


class FutureRoutes:
    """Routes of futures."""

    def __init__(
        self, futures: Futures, formats: Mapping[str, ResultFormat], *, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        self._futures = futures
        self._formats = formats
        self._wait_seconds = wait_seconds

    def routes(self) -> list[Route]:
        return [
            tinker_route('retrieve_future', self._retrieve, access=ANY_KEY),
            tinker_route('cancel_future', self._cancel, access=ANY_KEY),
        ]

    async def _retrieve(self, call: HttpCall) -> Response:
        future_id = (await read_body(call, FutureBody)).request_id
        future = await self._futures.wait(future_id, seconds=self._wait_seconds)
        if not future.is_finished:
            state = 'paused_rate_limit' if self._futures.is_rate_limited(future.tenant_id) else 'active'
            return JsonResponse({'type': 'try_again', 'request_id': future_id, 'queue_state': state})
        if future.state is FutureState.FAILED and future.error is not None:
            return JsonResponse({'error': text_of(future.error), 'category': category_of(future.error)})
        note = note_of(future)
        if note.verb not in self._formats:
            raise NotBuiltYet(note.verb or future.kind)
        # The result and the response built from it are both in memory until the client has read the response.
        await call.reserve_body(2 * await self._futures.result_bytes(future))
        result = await self._futures.result(future)
        return await self._formats[note.verb](Outcome(future, note, result, accepts_protobuf(call)))

    async def _cancel(self, call: HttpCall) -> Response:
        await self._futures.cancel((await read_body(call, FutureBody)).request_id)
        return JsonResponse({'type': 'cancel_future'})
