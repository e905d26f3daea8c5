"""Log-probabilities of given tokens, without sampling."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from services.kit.caller import Caller
from services.kit.errors import Cancelled, InvalidField
from services.sampler.application.generate import Generate, PromptRun, SampleCommand
from services.sampler.domain.generation import GenerationEvent, PromptComputed


@dataclass(frozen=True, kw_only=True)
class ScoredSequence:
    """The log-probabilities of one sequence and the version they are of."""

    prompt: PromptComputed
    version: int
    """0 is the base model alone."""


class ComputeLogprobs:
    """Scores sequences side by side."""

    def __init__(self, generate: Generate, *, max_concurrent_prompts: int) -> None:
        """Use the steps all sampling verbs share; a call takes at most so many of the tenant's turns."""
        self._generate = generate
        self._max_concurrent_prompts = max_concurrent_prompts

    async def __call__(self, caller: Caller, command: SampleCommand) -> list[ScoredSequence]:
        """Return the scores in the order of the command's prompts; its `max_tokens` is 0.

        Raises:
            DomainError: as the sampling verbs of the contract say; nothing was computed.
        """
        generate = self._generate
        generate.authorise(caller, command.base_model)
        sequences = [await self._encode(index, command) for index in range(len(command.prompts))]
        turns = asyncio.Semaphore(self._max_concurrent_prompts)
        with generate.running(caller, command.request_id) as request:
            async with generate.version(caller, command.adapter) as weights, asyncio.TaskGroup() as group:

                async def score(index: int) -> PromptComputed:
                    async with turns:
                        run = PromptRun(
                            token_ids=sequences[index], params=command.params, weights=weights, prompt_index=index
                        )
                        return await _prompt_of(generate(request, run))

                tasks = [group.create_task(score(index)) for index in range(len(sequences))]
        version = weights.key.version if weights else 0
        return [ScoredSequence(prompt=task.result(), version=version) for task in tasks]

    async def _encode(self, index: int, command: SampleCommand) -> tuple[int, ...]:
        try:
            return await self._generate.encode(command.prompts[index], command.params)
        except InvalidField as error:
            # Here a prompt is its tokens and nothing around them.
            raise InvalidField(f'token_ids[{index}]', error.problem) from error


async def _prompt_of(events: AsyncGenerator[GenerationEvent, None]) -> PromptComputed:
    """Return the prompt's event, having read all others: only then is the engine done with it.

    Raises:
        Cancelled: an operator ended the request first.
    """
    prompt: PromptComputed | None = None
    async with aclosing(events):
        async for event in events:
            if isinstance(event, PromptComputed):
                prompt = event
    if prompt is None or prompt.logprobs is None:
        raise Cancelled()
    return prompt
