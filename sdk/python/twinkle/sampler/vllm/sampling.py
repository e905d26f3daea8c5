"""Our sampling parameters in vLLM's words, one sequence at a time."""

import hashlib
from collections.abc import Sequence
from typing import Any

from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from twinkle.data_format import SamplingParams as OurParams
from twinkle.sampler.engine.request import TopTokens
from twinkle.sampler.engine.stopping import StopRules
from twinkle.sampler.vllm.forms import BEGUN_KEY
from twinkle.sampler.vllm.penalties import penalty_arguments


def sequence_seed(seed: int, sequence_index: int) -> int:
    """Return the seed of one sequence; a function of both numbers that keeps neighbours apart."""
    digest = hashlib.blake2b(f'{seed}/{sequence_index}'.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'little') >> 1


class CheckedParams(SamplingParams):
    """Parameters whose form was checked: vLLM would do it once for each sequence, while all requests wait."""

    def _validate_structured_outputs(self, *_: Any) -> None:
        """Find nothing."""


def vllm_params(
    params: OurParams,
    rules: StopRules,
    *,
    sequence_index: int,
    drawn: Sequence[int],
    form: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """Return what vLLM has to know to draw one sequence.

    Text, stop strings and the end of the sequence are ours: vLLM is told the stop tokens alone, so
    that it draws nothing in vain.

    Args:
        params: of the request.
        rules: what ends its sequences.
        sequence_index: which of them this is.
        drawn: tokens it has already; they are part of the prompt that vLLM gets.
        form: of its output, checked.
    """
    left = max(rules.max_tokens - len(drawn), 1)
    wants_prompt = sequence_index == 0 and not drawn
    return CheckedParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=0 if params.top_k == -1 else params.top_k,
        min_p=params.min_p,
        seed=None if params.seed is None else sequence_seed(params.seed, sequence_index),
        stop_token_ids=sorted(rules.token_ids),
        ignore_eos=True,
        max_tokens=left,
        min_tokens=min(max(rules.min_tokens - len(drawn), 0), left),
        logprobs=params.logprobs or 0,
        prompt_logprobs=params.prompt_logprobs if wants_prompt else None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=form,
        skip_clone=True,
        **_penalties_and_beginning(params, drawn),
    )


def top_tokens(logprobs: Any, position: int, *, count: int) -> TopTokens:
    """Return the entry of one position: the token itself first, then the `count` most likely ones."""
    flat: FlatLogprobs = logprobs
    entry = range(flat.start_indices[position], flat.end_indices[position])
    own, *best = [(flat.token_ids[place], flat.logprobs[place]) for place in entry]
    if len(best) < count:
        # vLLM joins outputs that nobody has taken yet by way of dictionaries, which hold a token once.
        best.insert((flat.ranks[entry.start] or 1) - 1, own)
    return [own, *best]


def _penalties_and_beginning(params: OurParams, drawn: Sequence[int]) -> dict[str, Any]:
    """Return the arguments that say how a sequence is penalised, and where its form goes on."""
    given = penalty_arguments(params, drawn)
    if drawn and params.structured_output is not None:
        given['extra_args'] = {**given.get('extra_args', {}), BEGUN_KEY: len(drawn)}
    return given
