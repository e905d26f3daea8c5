"""Responses for finished sampling futures: protobuf, or JSON for older clients.

Log-probabilities are those of the model before temperature and filters, equal to those that training computes.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from services.gateway.errors import SessionNotFound
from services.gateway.http.call import JsonResponse, Response
from services.gateway.sampling.handles import SamplingHandles
from services.gateway.tinker.arrays import Array, finite
from services.gateway.tinker.futures import Outcome, ProtobufResponse, ResultFormat, Verb
from services.gateway.tinker.wire import tinker_pb2 as wire
from services.kit.rpc.tensors import tensor_data_from_proto
from twinkle.api.sampler.v1 import sampler_service_pb2, sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2

NO_TOKEN, NO_LOGPROB = 0, -99999.0
"""Values of an empty cell."""


def sampling_formats(handles: SamplingHandles) -> Mapping[str, ResultFormat]:
    """Return the response format of each sampling verb; `handles` are told which version was published."""

    async def published(outcome: Outcome) -> Response:
        handle = str(outcome.note.facts.get('sampling_session_id', ''))
        # An interrupted save has left no handle; the client will resend it.
        with suppress(SessionNotFound):
            await handles.note_published(handle, outcome.result)
        return JsonResponse({'sampling_session_id': handle, 'type': Verb.SAVE_FOR_SAMPLER})

    return {Verb.SAMPLE: _sampled, Verb.PUBLISH: published}


async def _sampled(outcome: Outcome) -> Response:
    return await asyncio.to_thread(_sample_response, outcome)


def _sample_response(outcome: Outcome) -> Response:
    result = sampler_service_pb2.SampleBatchResponse.FromString(outcome.result)
    if any(sequence.stop_reason == sampling_pb2.STOP_REASON_ABORT for sequence in result.sequences):
        # Tinker has no stop reason for it.
        return JsonResponse({'error': 'sampling was aborted by the operator of the sampler', 'category': 'server'})
    if outcome.is_protobuf_accepted:
        return ProtobufResponse(sample_to_proto(result, outcome.note.facts).SerializeToString())
    return JsonResponse(sample_to_json(result, outcome.note.facts))


def sample_to_proto(result: sampler_service_pb2.SampleBatchResponse, facts: Mapping[str, Any]) -> wire.SampleResponse:
    """Return the sequences as a message.

    Args:
        result: Response of the sampler to one prompt.
        facts: Facts of the request, from `TinkerSampleRequest`.
    """
    response = wire.SampleResponse(prompt_cache_hit_tokens=result.prompt.cached_token_count)
    for sequence in result.sequences:
        added = response.sequences.add(
            stop_reason=wire.STOP_REASON_STOP if _is_stopped(sequence) else wire.STOP_REASON_LENGTH,
            tokens=_array(sequence.token_ids, '<i4').tobytes(),
            logprobs=_array(sequence.logprobs, '<f4').tobytes(),
        )
        if sequence.HasField('top_logprobs'):
            added.topk_sampled_logprobs.CopyFrom(_topk_to_proto(*_topk(sequence.top_logprobs)))
    scores = _prompt_scores(result.prompt, facts)
    if scores is not None:
        response.prompt_logprobs = scores.tobytes()
    if result.prompt.HasField('top_logprobs'):
        response.topk_prompt_logprobs.CopyFrom(_topk_to_proto(*_prompt_topk(result.prompt, facts)))
    return response


def sample_to_json(result: sampler_service_pb2.SampleBatchResponse, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sequences as a JSON document; see `sample_to_proto`."""
    document: dict[str, Any] = {
        'type': 'sample',
        'sequences': [
            {
                'stop_reason': 'stop' if _is_stopped(sequence) else 'length',
                'tokens': _array(sequence.token_ids, '<i4').tolist(),
                'logprobs': finite(_array(sequence.logprobs, '<f4')),
            }
            for sequence in result.sequences
        ],
    }
    scores = _prompt_scores(result.prompt, facts)
    if scores is not None:
        document['prompt_logprobs'] = finite(scores)
    if result.prompt.HasField('top_logprobs'):
        rows = zip(*(matrix.tolist() for matrix in _prompt_topk(result.prompt, facts)), strict=True)
        document['topk_prompt_logprobs'] = [_pairs(ids, logprobs) for ids, logprobs in rows]
    return document


def _prompt_scores(prompt: sampling_pb2.PromptInfo, facts: Mapping[str, Any]) -> Array | None:
    """Return float32 [N] log-probabilities of a prompt, NaN where there is no score; None if not requested."""
    if not prompt.HasField('logprobs') or not facts.get('is_scored', True):
        return None
    scores = _array(prompt.logprobs, '<f4').copy()
    scores[: _unscored(scores.size, facts)] = np.nan
    return scores


def _is_stopped(sequence: sampling_pb2.SampledSequence) -> bool:
    return sequence.stop_reason == sampling_pb2.STOP_REASON_STOP


def _unscored(length: int, facts: Mapping[str, Any]) -> int:
    """Return how many leading tokens of a prompt have no score."""
    return max(1, length - facts['last_n']) if 'last_n' in facts else 1


def _prompt_topk(prompt: sampling_pb2.PromptInfo, facts: Mapping[str, Any]) -> tuple[Array, Array]:
    ids, logprobs = _topk(prompt.top_logprobs)
    end = _unscored(len(ids), facts)
    ids[:end], logprobs[:end] = NO_TOKEN, NO_LOGPROB
    return ids, logprobs


def _topk(top: sampling_pb2.TopLogprobs) -> tuple[Array, Array]:
    ids, logprobs = _array(top.token_ids, '<i4').copy(), _array(top.logprobs, '<f4').copy()
    is_empty = ~np.isfinite(logprobs)
    ids[is_empty], logprobs[is_empty] = NO_TOKEN, NO_LOGPROB
    return ids, logprobs


def _topk_to_proto(ids: Array, logprobs: Array) -> wire.TopkLogprobs:
    length, count = ids.shape
    return wire.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=count, length=length)


def _pairs(ids: list[int], logprobs: list[float]) -> list[tuple[int, float]] | None:
    """Return the tokens at one position; None if there are none."""
    pairs = [(token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if logprob != NO_LOGPROB]
    return pairs or None


def _array(tensor: tensor_pb2.Tensor, dtype: str) -> Array:
    return tensor_data_from_proto(tensor, 'tensor').to_numpy().astype(dtype, copy=False)
