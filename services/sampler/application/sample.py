"""Stream the completions of one prompt."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from services.kit.caller import Caller
from services.sampler.application.generate import Generate, SampleCommand
from services.sampler.domain.generation import GenerationEvent


class Sample:
    """Yields the prompt once, tokens as they are drawn, and one end for each sequence."""

    def __init__(self, generate: Generate) -> None:
        """Use the steps all sampling verbs share."""
        self._generate = generate

    async def __call__(self, caller: Caller, command: SampleCommand) -> AsyncGenerator[GenerationEvent, None]:
        """Run `command`, which has one prompt. Closing the generator frees its memory at once.

        Raises:
            DomainError: as the sampling verbs of the contract say, before the first event.
        """
        generate = self._generate
        generate.authorise(caller, command.base_model)
        token_ids = await generate.encode(command.prompts[0], command.params)
        with generate.running(caller, command.request_id) as request:
            async with generate.version(caller, command.adapter) as adapter:
                events = generate(request, token_ids, command.params, adapter=adapter)
                async with aclosing(events):
                    async for event in events:
                        yield event
