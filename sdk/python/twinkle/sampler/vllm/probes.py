"""Prompt probes: vLLM samples tokens after each prefix of a prompt, and scores the requested tokens there.

The workers have already recorded the embedding (`embeddings.py`).

A probe starts when its prompt has been computed, so nearly all of each prefix is found in the prefix cache.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.sampling_params import RequestOutputKind, SamplingParams

from twinkle.data_format import ProbeResult, PromptProbe
from twinkle.sampler.errors import EngineFailed
from twinkle.sampler.vllm.embeddings import embedding_of
from twinkle.sampler.vllm.merge import merged
from twinkle.sampler.vllm.request import Run
from twinkle.sampler.vllm.sampling import sequence_seed

CONCURRENT_STEPS = 16
"""Maximum number of sequences that a probe runs concurrently, so that other requests are not delayed for long."""

Outputs = Callable[[str, list[int], SamplingParams], AsyncGenerator[Any, None]]
"""Returns vLLM's outputs for the id of a sequence, its prompt, and its parameters."""

CallWorkers = Callable[..., Awaitable[list[Any]]]
"""Calls a method of every worker, and returns the results."""


@dataclass(frozen=True)
class _Step:
    """One sampled token at one position."""

    row: int
    draw: int
    """Index of the token among the tokens drawn at the position."""
    targets: npt.NDArray[np.int32]
    """Tokens to score; empty for all but the first token of a position."""


async def probe_prompt(run: Run, outputs: Outputs, call_workers: CallWorkers) -> ProbeResult | None:
    """Return the result of a request's probe; None without a probe, or if the request was aborted.

    Raises:
        EngineFailed: no worker has recorded the embedding.
    """
    probe, prompt = run.request.params.prompt_probe, run.request.prompt_token_ids
    if probe is None:
        return None
    result = ProbeResult.empty(probe, len(prompt) - 1)
    if probe.is_embedding_returned and not run.is_aborted:
        embedding = embedding_of(await call_workers('twinkle_take_embedding', run.sequences[0].engine_id))
        if embedding is None:
            raise EngineFailed('the workers have not recorded the embedding; send the request again')
        result = replace(result, embedding=embedding)
    steps = _steps(probe, len(prompt) - 1)
    async with aclosing(merged([_stream(run, steps, outputs) for _ in range(CONCURRENT_STEPS)])) as found:
        async for step, output in found:
            _record(step, output.outputs[0], probe, result)
    return None if run.is_aborted else result


def _steps(probe: PromptProbe, rows: int) -> Iterator[_Step]:
    if probe.target_token_ids is None and not probe.draw_count:
        return
    none = np.empty(0, np.int32)
    for row in range(rows):
        targets = none if probe.target_token_ids is None else probe.target_token_ids[row]
        targets = np.unique(targets[targets >= 0])
        for draw in range(max(probe.draw_count, bool(targets.size))):
            yield _Step(row, draw, none if draw else targets)


async def _stream(run: Run, steps: Iterator[_Step], outputs: Outputs) -> AsyncGenerator[tuple[_Step, Any], None]:
    """Yield the outputs of steps, one after the other. Streams with the same iterator share its steps."""
    prompt = run.request.prompt_token_ids
    for step in steps:
        if run.is_aborted:
            return
        engine_id = f'{run.request.request_id}/{step.row}.{step.draw}'
        run.probe_ids.add(engine_id)
        try:
            async with aclosing(outputs(engine_id, list(prompt[: step.row + 1]), _params(run, step))) as found:
                async for output in found:
                    yield step, output
        finally:
            run.probe_ids.discard(engine_id)


def _params(run: Run, step: _Step) -> SamplingParams:
    params = run.request.params
    is_drawn = params.prompt_probe is not None and params.prompt_probe.draw_count > 0
    # Negative indices differ from the indices of all sequences, so drawn and sampled tokens are independent.
    seed = None if params.seed is None else sequence_seed(sequence_seed(params.seed, -1 - step.draw), step.row)
    return SamplingParams(
        temperature=params.temperature if is_drawn else 0.0,
        seed=seed,
        ignore_eos=True,
        max_tokens=1,
        logprobs=None if step.targets.size else 0,
        logprob_token_ids=step.targets.tolist() or None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _record(step: _Step, completion: Any, probe: PromptProbe, result: ProbeResult) -> None:
    if not completion.token_ids:
        return
    logprobs = dict(zip(completion.logprobs.token_ids, completion.logprobs.logprobs, strict=True))
    if result.drawn_token_ids is not None and result.drawn_logprobs is not None:
        token_id = completion.token_ids[0]
        result.drawn_token_ids[step.row, step.draw] = token_id
        result.drawn_logprobs[step.row, step.draw] = logprobs[token_id]
    if step.targets.size and probe.target_token_ids is not None and result.target_logprobs is not None:
        wanted = probe.target_token_ids[step.row]
        result.target_logprobs[step.row] = [logprobs[token] if token >= 0 else np.nan for token in wanted.tolist()]
