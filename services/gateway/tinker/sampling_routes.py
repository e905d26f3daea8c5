"""Sampling: sessions of weights to sample from, requests of theirs, and the ends of many requests at once."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.gateway.futures.executors import SampleTask
from services.gateway.futures.futures import Futures
from services.gateway.futures.rules import Future, FutureRequest, FutureState
from services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from services.gateway.http.fields import items, number, text, whole
from services.gateway.sampling.handles import SamplingHandles
from services.gateway.sampling.rules import HandleRequest, SamplingHandle
from services.gateway.tinker.base_models import BaseModels, need_named
from services.gateway.tinker.bodies import read_body
from services.gateway.tinker.fields import Fields, bounded_text
from services.gateway.tinker.future_routes import HOLD_SECONDS
from services.gateway.tinker.notes import Note
from services.gateway.tinker.paths import path_of_native
from services.gateway.tinker.routes import SAMPLE, tinker_route
from services.gateway.tinker.runs import KnownModels
from services.gateway.tinker.sampling_request import (
    SampleAsk,
    handle_id,
    sample_ask,
    sampler_path,
    topic_of,
)
from services.kit.errors import InvalidField, ServiceUnreachable
from services.kit.ids import new_id

SAMPLE_KIND = 'sample'
"""Kind of the futures; their payload is a `SampleTask`."""
SAMPLE_VERB = 'sample'
BODY_BYTES = 16 << 20
"""Of a request: a token takes about seven bytes."""
_MOST_IDS = 100_000
_counter = whole(0, (1 << 63) - 1)


class SamplingRoutes:
    """Serves them."""

    def __init__(
        self,
        futures: Futures,
        handles: SamplingHandles,
        runs: KnownModels,
        *,
        samplers: BaseModels,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        """Submit requests to `futures`.

        Args:
            futures: carry them out.
            handles: know the weights.
            runs: know the sessions.
            samplers: know what can be sampled.
            hold_seconds: how long a client is held that asks for these.
        """
        self._futures = futures
        self._handles = handles
        self._runs = runs
        self._samplers = samplers
        self._hold_seconds = hold_seconds

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            tinker_route('create_sampling_session', self._create, access=SAMPLE),
            tinker_route('join_sampling_session', self._join, access=SAMPLE),
            tinker_route('samplers/{sampling_session_id}', self._show, access=SAMPLE, http_method='GET'),
            tinker_route('asample', self._sample, access=SAMPLE),
            tinker_route('retrieve_futures', self._tell_ends, access=SAMPLE),
        ]

    async def _create(self, call: HttpCall) -> Response:
        order = await read_body(call, handle_order)
        await self._runs.check_open(order.session_id)
        if not order.checkpoint_path:
            order = replace(order, base_model=await self._need_sampleable(order.base_model))
        handle = await self._handles.open(order)
        return JsonResponse({'sampling_session_id': handle.handle_id, 'type': 'create_sampling_session'})

    async def _join(self, call: HttpCall) -> Response:
        handle = await read_body(call, lambda body: Fields(body).need('sampling_session_id', handle_id))
        number_of_copy = await self._handles.join(handle)
        return JsonResponse({'client_counter': number_of_copy, 'type': 'join_sampling_session'})

    async def _show(self, call: HttpCall) -> Response:
        call.body_done.set()
        handle = await self._handles.with_base(handle_id(call.path_values['sampling_session_id'], 'sampler_id'))
        answer = {'sampler_id': handle.handle_id, 'base_model': handle.base_model}
        if handle.checkpoint_path:
            answer['model_path'] = str(path_of_native(handle.checkpoint_path))
        return JsonResponse(answer)

    async def _sample(self, call: HttpCall) -> Response:
        ask = await read_body(call, sample_ask, limit_bytes=BODY_BYTES)
        if not (ask.handle_id or ask.model_path):
            ask = replace(ask, base_model=await self._need_sampleable(ask.base_model))
        handle = await self._weights_of(ask)
        base_model = handle.base_model if handle else ask.base_model
        await self._check_fits(ask, base_model)
        future = await self._futures.submit(await asyncio.to_thread(_order_of, ask, handle, call.headers))
        ids = [f'{future.future_id}-{place}' for place in range(ask.num_samples)]
        return JsonResponse({'request_id': future.future_id, 'sample_sequence_ids': ids})

    async def _tell_ends(self, call: HttpCall) -> Response:
        handle, clone, cursor, seconds = await read_body(call, _ends_wanted)
        await self._handles.get(handle)
        seconds = self._hold_seconds if seconds is None else min(seconds, self._hold_seconds)
        ended, cursor = await self._futures.topics.ended_after(topic_of(handle, clone), cursor=cursor, seconds=seconds)
        return JsonResponse({'completions': [_completion(future) for future in ended], 'cursor': cursor})

    async def _weights_of(self, ask: SampleAsk) -> SamplingHandle | None:
        """Return the handle of a request; without a session there is one for each checkpoint, and none for a base."""
        if ask.handle_id:
            handle = await self._handles.get(ask.handle_id)
            await self._runs.check_open(handle.session_id)
            return handle
        if ask.model_path is None:
            return None
        native = ask.model_path.native
        return await self._handles.open(HandleRequest(handle_id=native, session_id='', checkpoint_path=native))

    async def _need_sampleable(self, base_model: str) -> str:
        """Return the name of the base model that the client means."""
        known = [model for model in await self._samplers.list_all() if model.is_sampleable]
        if not known:
            raise ServiceUnreachable('sampler')
        return need_named(base_model, known, 'base_model').name

    async def _check_fits(self, ask: SampleAsk, base_model: str) -> None:
        """Check tokens and length, where the base model is known already; samplers check them, too."""
        model = await self._samplers.find(base_model) if base_model else None
        if model is None:
            return
        largest = int(ask.tokens.max())
        if 0 < model.vocabulary_size <= largest:
            raise InvalidField('prompt', f'token {largest} is not in the vocabulary of {model.vocabulary_size} tokens')
        length, limit = ask.tokens.size, model.context_tokens
        wanted = ask.request.params.max_tokens or 1
        if 0 < limit < length + wanted:
            window = f"the model's context window: {length} + {wanted} > {limit}"
            raise InvalidField('prompt', f'prompt length plus max_tokens exceeds {window}')


def handle_order(body: Mapping[str, Any]) -> HandleRequest:
    """Return the sampling session that is asked for.

    Raises:
        InvalidField: a field is wrong.
    """
    fields = Fields(body)
    session_id = fields.need('session_id', bounded_text(1, 128))
    place = fields.need('sampling_session_seq_id', whole(0, (1 << 31) - 1))
    path = sampler_path(fields)
    base_model = fields.get('base_model', bounded_text(1, 256), '')
    if path is None and not base_model:
        raise InvalidField('base_model', 'is required, unless model_path is given')
    return HandleRequest(
        handle_id=f'{session_id}:sample:{place}',
        session_id=session_id,
        base_model=base_model,
        checkpoint_path=path.native if path else '',
    )


def _order_of(ask: SampleAsk, handle: SamplingHandle | None, headers: Mapping[str, str]) -> FutureRequest:
    """Return what is submitted. Without a session, the client's own key tells repeats from new requests."""
    own_key = headers.get('x-idempotency-key', '')[:256] or new_id('rq')
    if handle is None:
        ask.request.base_model = ask.base_model
    request = ask.request.SerializeToString(deterministic=True)
    return FutureRequest(
        kind=SAMPLE_KIND,
        key=f'{ask.handle_id}:{ask.seq_id}' if ask.handle_id else f'sample:{own_key}',
        payload=SampleTask(handle.handle_id if handle else '', request).to_bytes(),
        session_id=handle.session_id if handle else '',
        note=str(Note(SAMPLE_VERB, dict(ask.facts))),
        topic=ask.topic,
        base_model=handle.base_model if handle else ask.base_model,
    )


def _ends_wanted(body: Mapping[str, Any]) -> tuple[str, int, int, float | None]:
    fields = Fields(body)
    target = fields.part('target')
    if target.get('type', text, 'sampling_session') != 'sampling_session':
        raise InvalidField('target.type', 'must be sampling_session')
    fields.get('retrieved_request_ids', _few, [])
    seconds = fields.need('timeout', number(0, 3600)) if 'timeout' in fields else None
    handle = target.need('sampling_session_id', handle_id)
    return handle, target.get('cloned_sampler_id', _counter, 0), fields.get('prev_cursor', _counter, 0), seconds


def _few(value: Any, field: str) -> list[Any]:
    if len(items(value, field)) > _MOST_IDS:
        raise InvalidField(field, f'must have at most {_MOST_IDS} entries')
    return value


def _completion(future: Future) -> dict[str, str]:
    state = 'finished' if future.state is FutureState.DONE else 'failed'
    return {'state': state, 'request_id': future.future_id}
