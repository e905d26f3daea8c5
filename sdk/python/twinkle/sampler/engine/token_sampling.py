"""Sampling of one token from one row of logits.

Token t of sequence i depends only on `(seed, i, t)`, its logits, the parameters and the earlier tokens: a hash gives a
uniform number, and the inverse of the cumulative distribution gives the token. There is no generator state, so
batching, order and restarts do not change the samples. V is the vocabulary size.
"""

import hashlib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from twinkle.data_format import SamplingParams
from twinkle.sampler.engine.request import TopTokens


def uniform(seed: int, sequence_index: int, token_index: int) -> float:
    """Return a number in [0, 1) with 53 random bits that depends only on the arguments."""
    key = f'{seed}/{sequence_index}/{token_index}'.encode()
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), 'little') >> 11) * 2.0**-53


def sample_token(
    logits_V: Tensor,
    params: SamplingParams,
    *,
    present: Collection[int],
    forbidden: Collection[int],
    number: float,
    sampled_ids: Sequence[int] = (),
) -> int:
    """Sample a token.

    Args:
        logits_V: float32 [V], the model's logits; not modified.
        params: sampling parameters, applied in this order: repetition, frequency and presence penalty, forbidden
            tokens, temperature, min_p, top_k, top_p.
        present: tokens already in the sequence, including the prompt.
        forbidden: tokens that must not be sampled.
        number: uniform random number in [0, 1).
        sampled_ids: tokens sampled so far, for the frequency and presence penalties.
    """
    scores_V = _forbid(_penalize(logits_V, params, present=present, sampled_ids=sampled_ids), forbidden)
    if params.temperature == 0.0:
        return int(scores_V.argmax())
    weights, token_ids = _candidates(scores_V, params)
    index = int(_inverted(weights, [number]))
    return index if token_ids is None else int(token_ids[index])


def draw_tokens(logits_V: Tensor, temperature: float, numbers: Sequence[float]) -> Tensor:
    """Draw tokens from the complete vocabulary, without filters and penalties.

    Args:
        logits_V: float32 [V], the model's logits; not modified.
        temperature: divides the logits; 0 selects the most likely token.
        numbers: a uniform random number in [0, 1) for each token.

    Returns:
        int64 [N], a token for each number.
    """
    if temperature == 0.0:
        return logits_V.argmax().expand(len(numbers))
    weights, _ = _candidates(logits_V, SamplingParams(temperature=temperature))
    return _inverted(weights, numbers)


def top_logprobs(logprobs_V: Tensor, token_id: int, count: int) -> TopTokens:
    """Return `token_id` with its log-probability, followed by the `count` most likely tokens."""
    return [(token_id, float(logprobs_V[token_id])), *most_likely(logprobs_V, count)]


def most_likely(logprobs_V: Tensor, count: int) -> TopTokens:
    """Return the `count` most likely tokens, most likely first."""
    if count == 0:
        return []
    values, token_ids = logprobs_V.topk(min(count, logprobs_V.shape[0]))
    return list(zip(token_ids.tolist(), values.tolist(), strict=True))


def _inverted(weights: Tensor, numbers: Sequence[float]) -> Tensor:
    """Return the index that the inverse of the cumulative distribution gives for each number, as int64 [N]."""
    cumulative = weights.cumsum(0)
    wanted = torch.tensor(numbers, dtype=cumulative.dtype, device=cumulative.device) * cumulative[-1]
    return torch.searchsorted(cumulative, wanted, right=True).clamp(max=int(weights.nonzero()[-1]))


def _penalize(
    logits_V: Tensor, params: SamplingParams, *, present: Collection[int], sampled_ids: Sequence[int]
) -> Tensor:
    """Return the logits with all penalties applied; without penalties, the given tensor."""
    scores_V = logits_V
    penalty = params.repetition_penalty
    if penalty != 1.0 and present:
        scores_V = scores_V.clone()
        index = torch.tensor(sorted(set(present)), device=scores_V.device)
        chosen = scores_V[index]
        # Extreme penalties would give infinities, whose differences are NaN.
        limits = torch.finfo(scores_V.dtype)
        penalized = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
        scores_V[index] = penalized.clamp(limits.min, limits.max)
    if sampled_ids and (params.frequency_penalty or params.presence_penalty):
        token_ids, counts = torch.tensor(sampled_ids, device=scores_V.device).unique(return_counts=True)
        scores_V = scores_V.clone() if scores_V is logits_V else scores_V
        scores_V[token_ids] -= params.frequency_penalty * counts + params.presence_penalty
    return scores_V


def _forbid(scores_V: Tensor, forbidden: Collection[int]) -> Tensor:
    if not forbidden:
        return scores_V
    scores_V = scores_V.clone()
    scores_V[torch.tensor(sorted(forbidden), device=scores_V.device)] = float('-inf')
    return scores_V


def _candidates(scores_V: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Return float64 weights of the candidate tokens, and their ids (None: all tokens in order)."""
    # The maximum is subtracted first, so that very low temperatures do not overflow.
    scores_V = scores_V.double()
    probs = torch.softmax((scores_V - scores_V.max()) / params.temperature, dim=0)
    token_ids: Tensor | None = None
    if params.min_p > 0.0:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
        probs = probs / probs.sum()
    if 0 < params.top_k < probs.shape[0]:
        probs, token_ids = _sorted(probs, probs >= probs.topk(params.top_k).values[-1])
        probs, token_ids = probs[: params.top_k], token_ids[: params.top_k]
        probs = probs / probs.sum()
    if params.top_p < 1.0:
        # Tokens below a probability of (1 - top_p) / V have less than 1 - top_p in total, so the nucleus excludes them.
        floor = (1.0 - params.top_p) / probs.shape[0]
        kept, kept_ids = _sorted(probs, probs >= floor)
        size = int(torch.searchsorted(kept.cumsum(0), params.top_p)) + 1
        probs = kept[:size]
        token_ids = kept_ids[:size] if token_ids is None else token_ids[kept_ids[:size]]
    return probs, token_ids


def _sorted(probs: Tensor, is_kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the selected probabilities in descending order with their indexes; ties keep their order."""
    indexes = is_kept.nonzero().squeeze(1)
    kept, order = probs[indexes].sort(descending=True, stable=True)
    return kept, indexes[order]
