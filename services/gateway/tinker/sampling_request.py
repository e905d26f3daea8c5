"""Sampling requests as native messages. A feature that the samplers lack is refused by name, not ignored.

Functions raise InvalidField with the path of the first wrong field.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter

from services.gateway.http.validation import Int64, StopStrings, StopTokens, fixed, not_served, read_model, read_value
from services.gateway.tinker.arrays import Array
from services.gateway.tinker.bodies import BaseModelName, Counter, LongCounter, TinkerModel, WeightsPathField
from services.gateway.tinker.datums import ModelInput, joined_tokens
from services.gateway.tinker.paths import WeightsKind, WeightsPath
from services.kit.errors import InvalidField
from twinkle.api.sampler.v1 import sampler_service_pb2, sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2

CLONE_SEQ_IDS = 1_000_000_000
"""Request numbers reserved for each clone of a client."""
MAX_TOPK = 20
"""Most alternatives that samplers report for a token."""
_STOP_STRINGS: TypeAdapter[list[str]] = TypeAdapter(StopStrings)
_STOP_TOKENS: TypeAdapter[list[int]] = TypeAdapter(StopTokens)
_SEQ_ID: TypeAdapter[int] = TypeAdapter(LongCounter)


def _sampler_weights(path: WeightsPath) -> WeightsPath:
    if path.kind is not WeightsKind.SAMPLER:
        problem = f'must be tinker://{{run}}/{WeightsKind.SAMPLER}/{{name}}: {path.kind} are not for sampling'
        raise ValueError(f'{problem}; save with save_weights_for_sampler')
    return path


HandleId = Annotated[str, Field(min_length=1, max_length=256)]
SamplerPath = Annotated[WeightsPathField, AfterValidator(_sampler_weights)]
"""Path of weights saved for sampling."""
_TopK = Annotated[int, Field(ge=0, le=MAX_TOPK)]


class SamplingParamsBody(TinkerModel):
    """Parameters of sampling in JSON."""

    temperature: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=(1 << 31) - 1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, le=(1 << 31) - 1)] | None = None
    seed: Int64 | None = None
    stop: Any = None
    """String, strings, or tokens; an empty list ignores even the model's end of sequence."""


class SampleBody(TinkerModel):
    """Body of `asample`."""

    target_prompt_logprobs: Annotated[
        None, not_served('is not supported; topk_prompt_logprobs reports the most likely tokens')
    ] = None
    prompt_alt_tokens_k: Annotated[Counter, fixed(0, 'is not supported; it must be 0')] = 0
    prompt: ModelInput
    sampling_params: SamplingParamsBody = SamplingParamsBody()
    num_samples: Annotated[int, Field(ge=1, le=128)] = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: _TopK = 0
    topk_sample_logprobs: _TopK = 0
    prompt_logprobs_last_n: int | None = None
    sampling_session_id: HandleId | None = None
    seq_id: Any = None
    """Number of the request, validated if it has a sampling session."""
    base_model: BaseModelName | None = None
    model_path: SamplerPath | None = None


@dataclass(frozen=True, kw_only=True)
class TinkerSampleRequest:
    """Validated sampling request."""

    handle_id: str
    """Sampling session; empty if the request names its weights."""
    seq_id: int
    """Number of the request within its sampling session."""
    base_model: str
    model_path: WeightsPath | None
    request: sampler_service_pb2.SampleBatchRequest
    """Native request without weights."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Facts for the response."""

    @property
    def sample_count(self) -> int:
        """Number of sequences."""
        return self.request.params.sample_count

    @property
    def tokens(self) -> Array:
        """Prompt, int32 [N]."""
        return np.frombuffer(self.request.prompts[0].token_ids.data, '<i4')

    @property
    def topic(self) -> str:
        """Topic of the completion, which all requests of one clone of a client share."""
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
    facts = _read_scores(given, params, prompt_length=tokens.size)
    request = sampler_service_pb2.SampleBatchRequest(params=params)
    request.prompts.add().token_ids.CopyFrom(
        tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[tokens.size], data=tokens.tobytes())
    )
    return TinkerSampleRequest(
        handle_id=handle_id,
        seq_id=seq_id,
        base_model=given.base_model or '',
        model_path=given.model_path,
        request=request,
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


def _read_scores(given: SampleBody, params: sampling_pb2.SamplingParams, *, prompt_length: int) -> dict[str, int]:
    """Set the requested log-probabilities, and return the facts that the response needs."""
    facts: dict[str, int] = {}
    params.is_prompt_logprobs_returned = given.prompt_logprobs
    if given.topk_prompt_logprobs:
        params.prompt_top_logprob_count = given.topk_prompt_logprobs
        facts['is_scored'] = given.prompt_logprobs
    if given.topk_sample_logprobs:
        params.top_logprob_count = given.topk_sample_logprobs
    if given.prompt_logprobs_last_n is not None:
        if not given.prompt_logprobs:
            raise InvalidField('prompt_logprobs_last_n', 'is accepted only with "prompt_logprobs": true')
        most = max(prompt_length - 1, 1)
        if not 1 <= given.prompt_logprobs_last_n <= most:
            raise InvalidField('prompt_logprobs_last_n', f'must be an integer, 1 to {most}')
        facts['last_n'] = given.prompt_logprobs_last_n
    return facts
