"""Complete many prompts; answers come in the order they finish."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

from services.kit.caller import Caller
from services.sampler.application.generate import Generate, PromptRun, SampleCommand
from services.sampler.domain.generation import (
    GenerationEvent,
    PromptComputed,
    SequenceEnded,
    TokensDrawn,
    TopTokens,
)
from services.sampler.domain.residency import ResidentVersion
from services.sampler.domain.running_requests import RunningRequest
from twinkle.data_format import StopReason, VersionSpan


@dataclass(kw_only=True)
class CompletedSequence:
    """One completion, gathered from its events."""

    stop_reason: StopReason = StopReason.ERROR
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TopTokens] = field(default_factory=list[TopTokens])
    text: str = ''
    version_spans: list[VersionSpan] = field(default_factory=list[VersionSpan])


@dataclass(frozen=True, kw_only=True)
class CompletedPrompt:
    """All completions of one prompt."""

    prompt_index: int
    prompt: PromptComputed
    sequences: list[CompletedSequence]
    """In order of their index."""


class SampleBatch:
    """Runs a batch's prompts side by side, as many at once as the engine has places."""

    def __init__(self, generate: Generate, *, max_concurrent_prompts: int) -> None:
        """Use the steps all sampling verbs share."""
        self._generate = generate
        self._max_concurrent_prompts = max_concurrent_prompts

    async def __call__(self, caller: Caller, command: SampleCommand) -> AsyncGenerator[CompletedPrompt, None]:
        """Yield each prompt once, in the order they finish.

        A slow reader lets at most as many finished prompts wait as run at once.

        Raises:
            DomainError: as the sampling verbs of the contract say; all prompts are checked before
                the first begins.
        """
        generate = self._generate
        generate.authorise(caller, command.base_model)
        prompts = [
            await generate.encode(prompt, command.params, field=f'prompts[{index}]')
            for index, prompt in enumerate(command.prompts)
        ]
        with generate.running(caller, command.request_id) as request:
            async with generate.version(caller, command.adapter) as weights:
                batch = _Batch(generate, request, command, weights=weights, prompts=enumerate(prompts))
                async with aclosing(batch.run(min(self._max_concurrent_prompts, len(prompts)))) as results:
                    async for result in results:
                        yield result


class _Batch:
    """The prompts of one call that are still to be run."""

    def __init__(
        self,
        generate: Generate,
        request: RunningRequest,
        command: SampleCommand,
        *,
        weights: ResidentVersion | None,
        prompts: Iterator[tuple[int, tuple[int, ...]]],
    ) -> None:
        self._generate = generate
        self._request = request
        self._params = command.params
        self._weights = weights
        self._prompts = prompts
        self._finished = asyncio.Queue[CompletedPrompt | None](maxsize=1)

    async def run(self, worker_count: int) -> AsyncGenerator[CompletedPrompt, None]:
        """Yield what `worker_count` workers finish; an error of one ends them all."""
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(self._work()) for _ in range(worker_count)]
            try:
                running = worker_count
                while running:
                    result = await self._finished.get()
                    if result is None:
                        running -= 1
                    else:
                        yield result
            finally:
                for worker in workers:
                    worker.cancel()

    async def _work(self) -> None:
        for index, token_ids in self._prompts:
            await self._finished.put(await self._complete(index, token_ids))
        await self._finished.put(None)

    async def _complete(self, index: int, token_ids: tuple[int, ...]) -> CompletedPrompt:
        run = PromptRun(token_ids=token_ids, params=self._params, weights=self._weights, prompt_index=index)
        prompt = PromptComputed(token_ids=token_ids)
        sequences = [CompletedSequence() for _ in range(self._params.num_samples)]
        async with aclosing(self._generate(self._request, run)) as events:
            async for event in events:
                if isinstance(event, PromptComputed):
                    prompt = event
                else:
                    _gather(sequences[event.sequence_index], event)
        return CompletedPrompt(prompt_index=index, prompt=prompt, sequences=sequences)


def _gather(sequence: CompletedSequence, event: GenerationEvent) -> None:
    if isinstance(event, TokensDrawn):
        sequence.tokens += event.tokens
        sequence.logprobs += event.logprobs
        sequence.text += event.text
    elif isinstance(event, SequenceEnded):
        sequence.text += event.text
        sequence.stop_reason = event.stop_reason
        sequence.version_spans = event.version_spans
