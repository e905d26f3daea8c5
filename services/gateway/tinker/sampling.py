"""Sampling: sessions of weights to sample from, sampling requests, and completions of many requests at once."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from services.gateway.futures.executors import SampleTask
from services.gateway.futures.futures import Futures
from services.gateway.futures.rules import Future, FutureRequest, FutureState
from services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from services.gateway.http.validation import read_value
from services.gateway.sampling.handles import SamplingHandles
from services.gateway.sampling.rules import HandleRequest, SamplingHandle
from services.gateway.tinker.base_models import BaseModels
from services.gateway.tinker.bodies import BaseModelName, Counter, LongCounter, TinkerModel, read_body, read_json
from services.gateway.tinker.futures import SAMPLE, WAIT_SECONDS, FutureNote, Verb
from services.gateway.tinker.operations import KnownModels
from services.gateway.tinker.paths import path_of_native
from services.gateway.tinker.routes import SAMPLE as SAMPLE_ACCESS
from services.gateway.tinker.routes import tinker_route
from services.gateway.tinker.sampling_request import (
    HandleId,
    SamplerPath,
    TinkerSampleRequest,
    sample_request,
    topic_of,
)
from services.kit.errors import InvalidField
from services.kit.ids import new_id

BODY_BYTES = 16 << 20
"""Most bytes of a sampling request; a token takes about seven."""
_HANDLE_ID: TypeAdapter[str] = TypeAdapter(HandleId)


class SamplingSessionBody(TinkerModel):
    """Body of `create_sampling_session`."""

    session_id: Annotated[str, Field(min_length=1, max_length=128)]
    sampling_session_seq_id: Counter
    model_path: SamplerPath | None = None
    base_model: BaseModelName | None = None


class JoinBody(TinkerModel):
    """Body of `join_sampling_session`."""

    sampling_session_id: HandleId


class CompletionTarget(TinkerModel):
    """Clone of a client whose completions are requested."""

    type: Literal['sampling_session'] = 'sampling_session'
    sampling_session_id: HandleId
    cloned_sampler_id: LongCounter = 0


class CompletionsBody(TinkerModel):
    """Body of `retrieve_futures`."""

    target: CompletionTarget
    retrieved_request_ids: list[Any] = Field(default_factory=list[Any], max_length=100_000)
    timeout: Annotated[float, Field(ge=0, le=3600)] | None = None
    """Seconds to wait for a completion."""
    prev_cursor: LongCounter = 0


class SamplingRoutes:
    """Routes of sampling sessions and sampling requests."""

    def __init__(
        self,
        futures: Futures,
        handles: SamplingHandles,
        known: KnownModels,
        *,
        samplers: BaseModels,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """Create the routes; a call waits at most `wait_seconds` for completions."""
        self._futures = futures
        self._handles = handles
        self._known = known
        self._samplers = samplers
        self._wait_seconds = wait_seconds

    def routes(self) -> list[Route]:
        return [
            tinker_route('create_sampling_session', self._create, access=SAMPLE_ACCESS),
            tinker_route('join_sampling_session', self._join, access=SAMPLE_ACCESS),
            tinker_route('samplers/{sampling_session_id}', self._show, access=SAMPLE_ACCESS, http_method='GET'),
            tinker_route('asample', self._sample, access=SAMPLE_ACCESS),
            tinker_route('retrieve_futures', self._list_completions, access=SAMPLE_ACCESS),
        ]

    async def _create(self, call: HttpCall) -> Response:
        given = await read_body(call, SamplingSessionBody)
        if given.model_path is None and given.base_model is None:
            raise InvalidField('base_model', 'is required, unless model_path is given')
        await self._known.check_session(given.session_id)
        base_model = given.base_model or ''
        if given.model_path is None:
            base_model = (await self._samplers.get_sampleable(base_model)).name
        handle = await self._handles.open(
            HandleRequest(
                handle_id=f'{given.session_id}:sample:{given.sampling_session_seq_id}',
                session_id=given.session_id,
                base_model=base_model,
                checkpoint_path=given.model_path.native if given.model_path else '',
            )
        )
        return JsonResponse({'sampling_session_id': handle.handle_id, 'type': 'create_sampling_session'})

    async def _join(self, call: HttpCall) -> Response:
        given = await read_body(call, JoinBody)
        clone_id = await self._handles.join(given.sampling_session_id)
        return JsonResponse({'client_counter': clone_id, 'type': 'join_sampling_session'})

    async def _show(self, call: HttpCall) -> Response:
        call.body_done.set()
        handle_id = read_value(_HANDLE_ID, call.path_values['sampling_session_id'], 'sampler_id')
        handle = await self._handles.with_base(handle_id)
        document = {'sampler_id': handle.handle_id, 'base_model': handle.base_model}
        if handle.checkpoint_path:
            document['model_path'] = str(path_of_native(handle.checkpoint_path))
        return JsonResponse(document)

    async def _sample(self, call: HttpCall) -> Response:
        request = await read_json(call, sample_request, limit_bytes=BODY_BYTES)
        if not (request.handle_id or request.model_path):
            request = replace(request, base_model=(await self._samplers.get_sampleable(request.base_model)).name)
        handle = await self._handle_of(request)
        await self._check_length(request, handle.base_model if handle else request.base_model)
        future = await self._futures.submit(await asyncio.to_thread(_future_request, request, handle, call.headers))
        ids = [f'{future.future_id}-{index}' for index in range(request.sample_count)]
        return JsonResponse({'request_id': future.future_id, 'sample_sequence_ids': ids})

    async def _list_completions(self, call: HttpCall) -> Response:
        given = await read_body(call, CompletionsBody)
        handle_id = given.target.sampling_session_id
        await self._handles.get(handle_id)
        seconds = self._wait_seconds if given.timeout is None else min(given.timeout, self._wait_seconds)
        topic = topic_of(handle_id, given.target.cloned_sampler_id)
        completed, cursor = await self._futures.topics.ended_after(topic, cursor=given.prev_cursor, seconds=seconds)
        return JsonResponse({'completions': [_completion(future) for future in completed], 'cursor': cursor})

    async def _handle_of(self, request: TinkerSampleRequest) -> SamplingHandle | None:
        """Return the handle of a request. Without a session, a checkpoint has one handle and a base model none."""
        if request.handle_id:
            handle = await self._handles.get(request.handle_id)
            await self._known.check_session(handle.session_id)
            return handle
        if request.model_path is None:
            return None
        native = request.model_path.native
        return await self._handles.open(HandleRequest(handle_id=native, session_id='', checkpoint_path=native))

    async def _check_length(self, request: TinkerSampleRequest, base_model: str) -> None:
        """Check tokens and length early, if the base model is known; samplers check them as well."""
        model = await self._samplers.find(base_model) if base_model else None
        if model is None:
            return
        largest = int(request.tokens.max())
        if 0 < model.vocabulary_size <= largest:
            raise InvalidField('prompt', f'token {largest} is not in the vocabulary of {model.vocabulary_size} tokens')
        length, limit = request.tokens.size, model.context_tokens
        wanted = request.request.params.max_tokens or 1
        if 0 < limit < length + wanted:
            window = f"the model's context window: {length} + {wanted} > {limit}"
            raise InvalidField('prompt', f'prompt length plus max_tokens exceeds {window}')


def _future_request(
    request: TinkerSampleRequest, handle: SamplingHandle | None, headers: Mapping[str, str]
) -> FutureRequest:
    """Return the future. Without a sampling session, the idempotency key identifies repeated requests."""
    request_key = headers.get('x-idempotency-key', '')[:256] or new_id('rq')
    if handle is None:
        request.request.base_model = request.base_model
    message = request.request.SerializeToString(deterministic=True)
    return FutureRequest(
        kind=SAMPLE,
        key=f'{request.handle_id}:{request.seq_id}' if request.handle_id else f'sample:{request_key}',
        payload=SampleTask(handle.handle_id if handle else '', message).to_bytes(),
        session_id=handle.session_id if handle else '',
        note=str(FutureNote(Verb.SAMPLE, dict(request.facts))),
        topic=request.topic,
        base_model=handle.base_model if handle else request.base_model,
    )


def _completion(future: Future) -> dict[str, str]:
    state = 'finished' if future.state is FutureState.DONE else 'failed'
    return {'state': state, 'request_id': future.future_id}
