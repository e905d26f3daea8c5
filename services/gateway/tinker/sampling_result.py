"""What came of sampling in Tinker's words: protobuf, or JSON for older clients.

Log-probabilities are the model's own, before temperature and filters: the ones that training computes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from services.gateway.tinker.arrays import Array, finite
from services.gateway.tinker.wire import tinker_pb2 as wire
from services.kit.rpc.tensors import tensor_data_from_proto
from twinkle.api.sampler.v1 import sampler_service_pb2, sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2

NO_TOKEN, NO_LOGPROB = 0, -99999.0
"""What stands in a cell that has no token."""


def is_aborted(answer: sampler_service_pb2.SampleBatchResponse) -> bool:
    """Return whether a sequence was ended from outside, for which Tinker has no word."""
    return any(sequence.stop_reason == sampling_pb2.STOP_REASON_ABORT for sequence in answer.sequences)


def sample_to_proto(answer: sampler_service_pb2.SampleBatchResponse, facts: Mapping[str, Any]) -> wire.SampleResponse:
    """Return the sequences as a message.

    Args:
        answer: what the sampler says of the prompt.
        facts: of the request, as `SampleAsk` has them.
    """
    response = wire.SampleResponse(prompt_cache_hit_tokens=answer.prompt.cached_token_count)
    for sequence in answer.sequences:
        added = response.sequences.add(
            stop_reason=wire.STOP_REASON_STOP if _is_stopped(sequence) else wire.STOP_REASON_LENGTH,
            tokens=_array(sequence.token_ids, '<i4').tobytes(),
            logprobs=_array(sequence.logprobs, '<f4').tobytes(),
        )
        if sequence.HasField('top_logprobs'):
            added.topk_sampled_logprobs.CopyFrom(_topk_to_proto(*_topk(sequence.top_logprobs)))
    scores = prompt_scores(answer.prompt, facts)
    if scores is not None:
        response.prompt_logprobs = scores.tobytes()
    if answer.prompt.HasField('top_logprobs'):
        response.topk_prompt_logprobs.CopyFrom(_topk_to_proto(*_prompt_topk(answer.prompt, facts)))
    return response


def sample_to_json(answer: sampler_service_pb2.SampleBatchResponse, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sequences as a JSON document; see `sample_to_proto`."""
    document: dict[str, Any] = {
        'type': 'sample',
        'sequences': [
            {
                'stop_reason': 'stop' if _is_stopped(sequence) else 'length',
                'tokens': _array(sequence.token_ids, '<i4').tolist(),
                'logprobs': finite(_array(sequence.logprobs, '<f4')),
            }
            for sequence in answer.sequences
        ],
    }
    scores = prompt_scores(answer.prompt, facts)
    if scores is not None:
        document['prompt_logprobs'] = finite(scores)
    if answer.prompt.HasField('top_logprobs'):
        rows = zip(*(matrix.tolist() for matrix in _prompt_topk(answer.prompt, facts)), strict=True)
        document['topk_prompt_logprobs'] = [_pairs(ids, logprobs) for ids, logprobs in rows]
    return document


def prompt_scores(prompt: sampling_pb2.PromptInfo, facts: Mapping[str, Any]) -> Array | None:
    """Return what the tokens of a prompt are worth; not a number where there is none, None where nobody asked."""
    if not prompt.HasField('logprobs') or not facts.get('is_scored', True):
        return None
    scores = _array(prompt.logprobs, '<f4').copy()
    scores[: _unscored(scores.size, facts)] = np.nan
    return scores


def _is_stopped(sequence: sampling_pb2.SampledSequence) -> bool:
    return sequence.stop_reason == sampling_pb2.STOP_REASON_STOP


def _unscored(length: int, facts: Mapping[str, Any]) -> int:
    """Return how many tokens of a prompt have no score: the first, and those before the last that were asked for."""
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
    """Return the tokens of a place; None where there are none."""
    pairs = [(token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if logprob != NO_LOGPROB]
    return pairs or None


def _array(tensor: tensor_pb2.Tensor, dtype: str) -> Array:
    return tensor_data_from_proto(tensor, 'tensor').to_numpy().astype(dtype, copy=False)
