"""Stream the completions of one prompt."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from services.kit.authority import require_internal
from services.kit.caller import Caller
from services.kit.errors import InvalidField
from services.sampler.application.generate import Generate, PromptRun, SampleCommand
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
        if command.continued:
            _check_continued(caller, command)
        token_ids = await generate.encode(command.prompts[0], command.params)
        with generate.running(caller, command.request_id) as request:
            async with generate.version(caller, command.adapter) as weights:
                run = PromptRun(
                    token_ids=token_ids, params=command.params, weights=weights, continued=command.continued
                )
                async with aclosing(generate(request, run)) as events:
                    async for event in events:
                        yield event


def _check_continued(caller: Caller, command: SampleCommand) -> None:
    """Refuse whoever could not know what another sampler drew, or with which weights.

    Raises:
        ScopeMissing: the caller is no service of this deployment.
        InvalidField: the weights are not named exactly.
    """
    require_internal(caller)
    if command.adapter is not None and command.adapter.exact is None:
        raise InvalidField('adapter.exact', 'must be set where `continued` is: tokens of other weights are not mixed')
