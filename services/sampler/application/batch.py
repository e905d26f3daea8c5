"""A batch of prompts that run concurrently and are returned in the order in which they finish."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.data_format import SamplingParams, StopReason, VersionSpan
from twinkle_services.sampler.application.prompt_runner import PromptRun, PromptRunner
from twinkle_services.sampler.domain.generation import (
    GenerationEvent,
    PromptComputed,
    SequenceFinished,
    TokensSampled,
    TopTokens,
)
from twinkle_services.sampler.domain.residency import ResidentVersion
from twinkle_services.sampler.domain.running_requests import RunningRequest


@dataclass(kw_only=True)
class CompletedSequence:
    """One completion, collected from its events."""

    stop_reason: StopReason = StopReason.ERROR
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TopTokens] = field(default_factory=list[TopTokens])
    text: str = ''
    version_spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    routed_experts: npt.NDArray[np.integer[Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class CompletedPrompt:
    """All completions of one prompt."""

    prompt_index: int
    prompt: PromptComputed
    sequences: list[CompletedSequence]
    """Completions in the order of their index."""


class Batch:
    """Runs the prompts of one request concurrently."""

    def __init__(
        self,
        runner: PromptRunner,
        request: RunningRequest,
        prompts: Sequence[tuple[int, ...]],
        *,
        params: SamplingParams,
        weights: ResidentVersion | None,
    ) -> None:
        self._runner = runner
        self._request = request
        self._params = params
        self._weights = weights
        self._prompts = enumerate(prompts)
        self._finished = asyncio.Queue[CompletedPrompt | None](maxsize=1)

    async def run(self, worker_count: int) -> AsyncGenerator[CompletedPrompt, None]:
        """Run the prompts with `worker_count` workers and yield each prompt when it is finished.

        Closing the generator cancels the workers. At most `worker_count + 1` finished prompts wait for a slow reader.

        Raises:
            BaseExceptionGroup: A worker failed with the error in the group; the other workers were cancelled.
        """
        # A task group around `yield` would turn the GeneratorExit of a closed generator into an exception group.
        work = asyncio.create_task(self._work(worker_count))
        try:
            while (result := await self._finished.get()) is not None:
                yield result
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _work(self, worker_count: int) -> None:
        """Run all workers, and put None into the queue after the last result."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(worker_count):
                    group.create_task(self._complete_prompts())
        except BaseExceptionGroup:
            await self._finished.put(None)
            raise
        await self._finished.put(None)

    async def _complete_prompts(self) -> None:
        for index, token_ids in self._prompts:
            await self._finished.put(await self._complete(index, token_ids))

    async def _complete(self, index: int, token_ids: tuple[int, ...]) -> CompletedPrompt:
        run = PromptRun(token_ids=token_ids, params=self._params, weights=self._weights, prompt_index=index)
        prompt = PromptComputed(token_ids=token_ids)
        sequences = [CompletedSequence() for _ in range(self._params.num_samples)]
        async with aclosing(self._runner.run(self._request, run)) as events:
            async for event in events:
                if isinstance(event, PromptComputed):
                    prompt = event
                else:
                    _collect(sequences[event.sequence_index], event)
        return CompletedPrompt(prompt_index=index, prompt=prompt, sequences=sequences)


def _collect(sequence: CompletedSequence, event: GenerationEvent) -> None:
    if isinstance(event, TokensSampled):
        sequence.tokens += event.tokens
        sequence.logprobs += event.logprobs
        sequence.text += event.text
    elif isinstance(event, SequenceFinished):
        sequence.text += event.text
        sequence.stop_reason = event.stop_reason
        sequence.version_spans = event.version_spans
        sequence.routed_experts = event.routed_experts
