"""Conversion of sampling parameters and log-probabilities between this library and vLLM, per sequence."""

import hashlib
from collections.abc import Sequence
from typing import Any

from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from twinkle.data_format import SamplingParams as OurParams
from twinkle.sampler.engine.request import TopTokens
from twinkle.sampler.engine.stopping import StopRules
from twinkle.sampler.vllm.embeddings import EMBEDDING_KEY
from twinkle.sampler.vllm.forms import BEGUN_KEY
from twinkle.sampler.vllm.penalties import penalty_arguments


def sequence_seed(seed: int, sequence_index: int) -> int:
    """Return the seed of one sequence, a hash of both numbers."""
    digest = hashlib.blake2b(f'{seed}/{sequence_index}'.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'little') >> 1


class CheckedParams(SamplingParams):
    """Parameters with checked structured output.

    vLLM would repeat the check for each sequence and delay all requests.
    """

    def _validate_structured_outputs(self, *_: Any) -> None:
        """Skip the check."""


def vllm_params(
    params: OurParams,
    rules: StopRules,
    *,
    sequence_index: int,
    sampled_ids: Sequence[int],
    form: StructuredOutputsParams | None = None,
    prompt_key: str = '',
) -> SamplingParams:
    """Return vLLM's parameters for one sequence.

    This library handles text, stop strings and the end of the sequence. vLLM receives the stop tokens and the limits of
    the number of tokens, so that it stops as early as it can.

    Args:
        params: sampling parameters of the request.
        rules: stop rules of the request.
        sequence_index: index of the sequence in the request.
        sampled_ids: tokens sampled by another engine, which are part of vLLM's prompt.
        form: checked structured output.
        prompt_key: key of the prompt's embedding, for the sequence that computes the embedding and the
            log-probabilities of the prompt; empty for other sequences and for continued requests.
    """
    left = max(rules.max_tokens - len(sampled_ids), 1)
    return CheckedParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=0 if params.top_k == -1 else params.top_k,
        min_p=params.min_p,
        seed=None if params.seed is None else sequence_seed(params.seed, sequence_index),
        stop_token_ids=sorted(rules.token_ids),
        ignore_eos=True,
        max_tokens=left,
        min_tokens=min(max(rules.min_tokens - len(sampled_ids), 0), left),
        logprobs=params.logprobs or 0,
        prompt_logprobs=params.prompt_logprobs if prompt_key else None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=form,
        skip_clone=True,
        **_more_arguments(params, sampled_ids, prompt_key),
    )


def top_tokens(logprobs: Any, position: int, *, count: int) -> TopTokens:
    """Return the entry of one position: the token itself, followed by the `count` most likely tokens."""
    flat: FlatLogprobs = logprobs
    entry = range(flat.start_indices[position], flat.end_indices[position])
    sampled, *best = [(flat.token_ids[index], flat.logprobs[index]) for index in entry]
    if len(best) < count:
        # vLLM merges unread outputs through dictionaries, which contain the sampled token only once.
        best.insert((flat.ranks[entry.start] or 1) - 1, sampled)
    return [sampled, *best]


def _more_arguments(params: OurParams, sampled_ids: Sequence[int], embedding_key: str) -> dict[str, Any]:
    """Return the arguments for penalties, for continuing structured output, and for the embedding of the prompt."""
    arguments = penalty_arguments(params, sampled_ids)
    extra: dict[str, Any] = {}
    if sampled_ids and params.structured_output is not None:
        extra[BEGUN_KEY] = len(sampled_ids)
    if embedding_key and params.prompt_probe is not None and params.prompt_probe.is_embedding_returned:
        extra[EMBEDDING_KEY] = embedding_key
    return {**arguments, 'extra_args': {**arguments.get('extra_args', {}), **extra}} if extra else arguments
