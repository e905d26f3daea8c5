"""Routes for sampling sessions, sampling requests, and the completions of many requests.

Functions raise InvalidField with the path of the first wrong field.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PlainValidator, TypeAdapter, ValidationInfo

from twinkle.api.sampler.v1 import sampler_service_pb2, sampling_pb2
from twinkle.data_format.prompt_probe import MAX_DRAWS
from twinkle_services.gateway.catalogue.paths import WeightsPath, parse_sampler_path, path_of_native
from twinkle_services.gateway.errors import WeightsNotSaved
from twinkle_services.gateway.fleet.model_routes import shown_name
from twinkle_services.gateway.futures.executors import SampleTask
from twinkle_services.gateway.futures.rules import SAMPLE_KIND, Future, FutureRequest, FutureState
from twinkle_services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from twinkle_services.gateway.http.validation import Int64, StopStrings, StopTokens, read_model, read_value
from twinkle_services.gateway.sampling.handles import SamplingHandles
from twinkle_services.gateway.sampling.rules import HandleRequest, SamplingHandle
from twinkle_services.gateway.tinker.arrays import Array
from twinkle_services.gateway.tinker.base_models import BaseModels
from twinkle_services.gateway.tinker.bodies import (
    BaseModelName,
    Counter,
    LongCounter,
    TinkerModel,
    read_body,
    read_json,
)
from twinkle_services.gateway.tinker.datums import TARGETS, ModelInput, joined_tokens, probe_from_json
from twinkle_services.gateway.tinker.routes import SAMPLE, WAIT_SECONDS, tinker_route
from twinkle_services.gateway.tinker.submission import FutureNote, Operations, Verb
from twinkle_services.kit.errors import DomainError, InvalidField
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.rpc.tensors import tensor_to_proto

CLONE_SEQ_IDS = 1_000_000_000
"""Number of sequence ids reserved for each clone of a client."""
MAX_TOPK = 20
"""Maximum number of alternatives that samplers report for a token."""
_STOP_STRINGS: TypeAdapter[list[str]] = TypeAdapter(StopStrings)
_STOP_TOKENS: TypeAdapter[list[int]] = TypeAdapter(StopTokens)
_SEQ_ID: TypeAdapter[int] = TypeAdapter(LongCounter)
BODY_BYTES = 16 << 20
"""Maximum number of bytes of a sampling request; a token takes about seven bytes."""


def _sampler_path(value: Any, info: ValidationInfo) -> WeightsPath:
    return parse_sampler_path(value, info.field_name or 'model_path')


HandleId = Annotated[str, Field(min_length=1, max_length=256)]
_HANDLE_ID: TypeAdapter[str] = TypeAdapter(HandleId)
SamplerPath = Annotated[WeightsPath, PlainValidator(_sampler_path)]
"""Path of weights saved for sampling. Use it only for fields at the top level of a body."""
_TopK = Annotated[int, Field(ge=0, le=MAX_TOPK)]


class SamplingParamsBody(TinkerModel):
    """Parameters of sampling in JSON."""

    temperature: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=(1 << 31) - 1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, le=(1 << 31) - 1)] | None = None
    seed: Int64 | None = None
    stop: Any = None
    """A string, a list of strings, or a list of tokens; an empty list also ignores the end-of-sequence token."""


class SampleBody(TinkerModel):
    """Body of `asample`."""

    prompt: ModelInput
    sampling_params: SamplingParamsBody = SamplingParamsBody()
    num_samples: Annotated[int, Field(ge=1, le=128)] = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: _TopK = 0
    topk_sample_logprobs: _TopK = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: dict[str, Any] | None = None
    """Matrix of tokens to score at the positions of the prompt."""
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=MAX_DRAWS)] = 0
    sampling_session_id: HandleId | None = None
    seq_id: Any = None
    """Number of the request within its sampling session; ignored without a session."""
    base_model: BaseModelName | None = None
    model_path: SamplerPath | None = None


@dataclass(frozen=True, kw_only=True)
class TinkerSampleRequest:
    """Validated sampling request."""

    handle_id: str
    """Sampling session; empty if the request names its weights."""
    seq_id: int
    """Number of the request within its sampling session; 0 without a session."""
    base_model: str
    model_path: WeightsPath | None
    request: sampler_service_pb2.SampleBatchRequest
    """Native request without weights."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Facts for the response."""

    @property
    def sample_count(self) -> int:
        return self.request.params.sample_count

    @property
    def tokens(self) -> Array:
        """Tokens of the prompt, int32, one dimension."""
        return np.frombuffer(self.request.prompts[0].token_ids.data, '<i4')

    @property
    def targets(self) -> Array:
        """Tokens to score at all positions of the prompt, int32, flattened to one dimension; -1 for no token."""
        return np.frombuffer(self.request.params.prompt_probe.target_token_ids.data, '<i4')

    @property
    def topic(self) -> str:
        """Topic of the completion, shared by all requests of one clone of a client; empty without a session."""
        return topic_of(self.handle_id, self.seq_id // CLONE_SEQ_IDS) if self.handle_id else ''


def topic_of(handle_id: str, clone_id: int) -> str:
    """Return the topic of completions for one clone of a client."""
    return f'{handle_id}/{clone_id}'


def sample_request(body: Mapping[str, Any]) -> TinkerSampleRequest:
    """Validate and convert a body of `asample`."""
    given = read_model(SampleBody, body)
    tokens = joined_tokens(given.prompt, 'prompt').astype('<i4')
    if not tokens.size:
        raise InvalidField('prompt.chunks', 'must contain at least one token')
    handle_id = given.sampling_session_id or ''
    if not handle_id and given.base_model is None and given.model_path is None:
        raise InvalidField('sampling_session_id', 'is required, unless base_model or model_path is given')
    if handle_id and given.seq_id is None:
        raise InvalidField('seq_id', 'is required')
    seq_id = read_value(_SEQ_ID, given.seq_id, 'seq_id') if handle_id else 0
    params = _sampling_params(given)
    facts = _set_logprob_params(given, params, prompt_length=tokens.size)
    probe = probe_from_json(given.target_prompt_logprobs, given.prompt_alt_tokens_k, prompt_length=tokens.size)
    params.MergeFrom(sampling_pb2.SamplingParams(prompt_probe=probe))
    prompt = sampling_pb2.Prompt(token_ids=tensor_to_proto(tokens))
    return TinkerSampleRequest(
        handle_id=handle_id,
        seq_id=seq_id,
        base_model=given.base_model or '',
        model_path=given.model_path,
        request=sampler_service_pb2.SampleBatchRequest(params=params, prompts=[prompt]),
        facts=facts,
    )


def _sampling_params(given: SampleBody) -> sampling_pb2.SamplingParams:
    wanted = given.sampling_params
    params = sampling_pb2.SamplingParams(
        temperature=wanted.temperature,
        top_k=wanted.top_k or -1,
        top_p=wanted.top_p,
        max_tokens=wanted.max_tokens,
        seed=wanted.seed,
        sample_count=given.num_samples,
    )
    match wanted.stop:
        case None:
            pass
        case []:
            params.is_eos_ignored = True
        case [first, *_] if type(first) is int:
            params.stop_token_ids.extend(read_value(_STOP_TOKENS, wanted.stop, 'sampling_params.stop'))
        case _:
            params.stop_strings.extend(read_value(_STOP_STRINGS, wanted.stop, 'sampling_params.stop'))
    return params


def _set_logprob_params(
    given: SampleBody, params: sampling_pb2.SamplingParams, *, prompt_length: int
) -> dict[str, int]:
    """Set the requested log-probabilities, and return the facts that the response needs."""
    facts: dict[str, int] = {}
    if (given.target_prompt_logprobs or {}).get('sparse_crow_indices') is not None:
        facts['is_sparse'] = True
    params.is_prompt_logprobs_returned = given.prompt_logprobs
    if given.topk_prompt_logprobs:
        params.prompt_top_logprob_count = given.topk_prompt_logprobs
        facts['is_scored'] = given.prompt_logprobs
    if given.topk_sample_logprobs:
        params.top_logprob_count = given.topk_sample_logprobs
    if given.prompt_logprobs_last_n is not None:
        if not given.prompt_logprobs:
            raise InvalidField('prompt_logprobs_last_n', 'is accepted only with "prompt_logprobs": true')
        maximum = max(prompt_length - 1, 1)
        if not 1 <= given.prompt_logprobs_last_n <= maximum:
            raise InvalidField('prompt_logprobs_last_n', f'must be an integer from 1 to {maximum}')
        facts['last_n'] = given.prompt_logprobs_last_n
    return facts


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
    """Ignored; `prev_cursor` identifies the completions that the client has received."""
    timeout: Annotated[float, Field(ge=0, le=3600)] | None = None
    """Seconds to wait for a completion."""
    prev_cursor: LongCounter = 0


class SamplingRoutes:
    """Routes of sampling sessions and sampling requests."""

    def __init__(
        self,
        operations: Operations,
        handles: SamplingHandles,
        *,
        samplers: BaseModels,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """Create the routes; a call waits at most `wait_seconds` for completions."""
        self._operations = operations
        self._futures = operations.futures
        self._handles = handles
        self._samplers = samplers
        self._wait_seconds = wait_seconds

    def routes(self) -> list[Route]:
        return [
            tinker_route('create_sampling_session', self._create, access=SAMPLE),
            tinker_route('join_sampling_session', self._join, access=SAMPLE),
            tinker_route('samplers/{sampling_session_id}', self._show, access=SAMPLE, http_method='GET'),
            tinker_route('asample', self._sample, access=SAMPLE),
            tinker_route('retrieve_futures', self._list_completions, access=SAMPLE),
        ]

    async def _create(self, call: HttpCall) -> Response:
        given = await read_body(call, SamplingSessionBody)
        if given.model_path is None and given.base_model is None:
            raise InvalidField('base_model', 'is required, unless model_path is given')
        await self._operations.check_session(given.session_id)
        base_model = given.base_model or ''
        if given.model_path is None:
            base_model = (await self._samplers.get_sampleable(base_model)).name
        handle = await self._open(
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
        document = {'sampler_id': handle.handle_id, 'base_model': shown_name(handle.base_model)}
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
        completed, cursor = await self._futures.topics.finished_after(topic, cursor=given.prev_cursor, seconds=seconds)
        return JsonResponse({'completions': [_completion(future) for future in completed], 'cursor': cursor})

    async def _handle_of(self, request: TinkerSampleRequest) -> SamplingHandle | None:
        """Return the handle of the sampling session or checkpoint that a request names; None if it names neither."""
        if request.handle_id:
            handle = await self._handles.get(request.handle_id)
            await self._operations.check_session(handle.session_id)
            return handle
        if request.model_path is None:
            return None
        native = request.model_path.native
        return await self._open(HandleRequest(handle_id=native, session_id='', checkpoint_path=native))

    async def _open(self, request: HandleRequest) -> SamplingHandle:
        try:
            return await self._handles.open(request)
        except DomainError as error:
            if error.reason != WeightsNotSaved.reason:
                raise
            raise WeightsNotSaved(str(path_of_native(request.checkpoint_path))) from error

    async def _check_length(self, request: TinkerSampleRequest, base_model: str) -> None:
        """Check tokens and length before a request is queued, if its base model is known. Samplers check again."""
        model = await self._samplers.find(base_model) if base_model else None
        if model is None:
            return
        for field_name, tokens in (('prompt', request.tokens), (TARGETS, request.targets)):
            largest = int(tokens.max(initial=0))
            if 0 < model.vocabulary_size <= largest:
                problem = f'token {largest} is not in the vocabulary of {model.vocabulary_size} tokens'
                raise InvalidField(field_name, problem)
        length, limit = request.tokens.size, model.context_tokens
        wanted = request.request.params.max_tokens or 1
        if 0 < limit < length + wanted:
            window = f"the model's context window: {length} + {wanted} > {limit}"
            raise InvalidField('prompt', f'prompt length plus max_tokens exceeds {window}')


def _future_request(
    request: TinkerSampleRequest, handle: SamplingHandle | None, headers: Mapping[str, str]
) -> FutureRequest:
    """Return the future's request; without a sampling session, the idempotency key identifies repeated requests."""
    request_key = headers.get('x-idempotency-key', '')[:256] or new_id('rq')
    if handle is None:
        request.request.base_model = request.base_model
    message = request.request.SerializeToString(deterministic=True)
    return FutureRequest(
        kind=SAMPLE_KIND,
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
