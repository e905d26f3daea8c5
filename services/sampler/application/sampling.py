"""Sampling: streams the completions of one prompt, completes batches, scores sequences, and describes tokens."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from twinkle_services.kit.caller import Caller, require_internal
from twinkle_services.kit.errors import Cancelled, InvalidField
from twinkle_services.sampler.application.batch import Batch, CompletedPrompt
from twinkle_services.sampler.application.prompt_runner import PromptRun, PromptRunner, SampleRequest
from twinkle_services.sampler.domain.generation import GenerationEvent, PromptComputed, TokenForm
from twinkle_services.sampler.domain.residency import ResidentVersion
from twinkle_services.sampler.domain.running_requests import RunningRequest
from twinkle_services.sampler.ports import SamplerEngine


@dataclass(frozen=True, kw_only=True)
class ScoredSequence:
    """Log-probabilities of one sequence."""

    prompt: PromptComputed
    version: int
    """Version of the weights that computed the log-probabilities; 0 for the base model alone."""


class Sampling:
    """Samples from the base model and from adapters, and computes log-probabilities of given sequences.

    Args:
        engine: Engine whose tokens are described.
        runner: Runs the prompts.
        max_concurrent_prompts: Maximum number of prompts of one request that run at the same time.
    """

    def __init__(self, engine: SamplerEngine, runner: PromptRunner, *, max_concurrent_prompts: int) -> None:
        self._engine = engine
        self._runner = runner
        self._max_concurrent_prompts = max_concurrent_prompts

    async def sample(self, caller: Caller, request: SampleRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the prompt once, tokens as they are sampled, and one `SequenceFinished` per sequence.

        A continued request yields no prompt, and no events of sequences that were finished already. Closing the
        generator frees the request's memory immediately.

        Args:
            caller: The tenant that samples.
            request: A request with one prompt.

        Raises:
            DomainError: An error that the API documents for sampling.
        """
        runner = self._runner
        runner.authorize(caller, request.base_model)
        if request.continued:
            _check_continued(caller, request)
        token_ids = await runner.encode(request.prompts[0], request.params)
        with runner.running(caller, request.request_id) as running:
            async with runner.lease(caller, request.adapter) as weights:
                run = PromptRun(
                    token_ids=token_ids, params=request.params, weights=weights, continued=request.continued
                )
                async with aclosing(runner.run(running, run)) as events:
                    async for event in events:
                        yield event

    async def sample_batch(self, caller: Caller, request: SampleRequest) -> AsyncGenerator[CompletedPrompt, None]:
        """Yield each prompt when it is finished.

        All prompts are checked before the first one runs. A slow reader delays the prompts: at most
        `max_concurrent_prompts + 1` finished prompts are buffered.

        Raises:
            DomainError: An error that the API documents for sampling, raised before the first prompt runs.
            BaseExceptionGroup: A prompt failed while it ran.
        """
        runner = self._runner
        runner.authorize(caller, request.base_model)
        prompts = [
            await runner.encode(prompt, request.params, field=f'prompts[{index}]')
            for index, prompt in enumerate(request.prompts)
        ]
        with runner.running(caller, request.request_id) as running:
            async with runner.lease(caller, request.adapter) as weights:
                batch = Batch(runner, running, prompts, params=request.params, weights=weights)
                async with aclosing(batch.run(min(self._max_concurrent_prompts, len(prompts)))) as results:
                    async for result in results:
                        yield result

    async def compute_logprobs(self, caller: Caller, request: SampleRequest) -> list[ScoredSequence]:
        """Return the log-probabilities of the prompts' tokens, in the order of the prompts; nothing is sampled.

        Args:
            caller: The tenant that requests the log-probabilities.
            request: The sequences to score, as prompts, with `max_tokens` 0.

        Raises:
            DomainError: An error that the API documents for sampling; nothing was computed.
            BaseExceptionGroup: The request was aborted, or a sequence failed while it ran.
        """
        runner = self._runner
        runner.authorize(caller, request.base_model)
        sequences = [await self._encode(index, request) for index in range(len(request.prompts))]
        slots = asyncio.Semaphore(self._max_concurrent_prompts)
        with runner.running(caller, request.request_id) as running:
            async with runner.lease(caller, request.adapter) as weights, asyncio.TaskGroup() as group:

                async def score(index: int) -> PromptComputed:
                    async with slots:
                        run = PromptRun(
                            token_ids=sequences[index], params=request.params, weights=weights, prompt_index=index
                        )
                        return await self._score(running, run)

                tasks = [group.create_task(score(index)) for index in range(len(sequences))]
        return [ScoredSequence(prompt=task.result(), version=_version_of(weights)) for task in tasks]

    async def describe_tokens(self, base_model: str, token_ids: tuple[int, ...]) -> tuple[TokenForm, ...]:
        """Return the bytes and kind of each token, in order.

        Raises:
            BaseModelNotFound: This sampler serves another base model.
            InvalidField: A token is outside the vocabulary.
        """
        self._runner.check_base_model(base_model)
        return await self._engine.describe_tokens(token_ids)

    async def _encode(self, index: int, request: SampleRequest) -> tuple[int, ...]:
        try:
            return await self._runner.encode(request.prompts[index], request.params)
        except InvalidField as error:
            # A sequence to score consists of tokens only, in the field `token_ids` of the request.
            raise InvalidField(f'token_ids[{index}]', error.problem) from error

    async def _score(self, request: RunningRequest, run: PromptRun) -> PromptComputed:
        """Return the prompt event after reading all events, so that the engine has finished the prompt.

        Raises:
            Cancelled: The request was aborted before its prompt was computed.
        """
        prompt: PromptComputed | None = None
        async with aclosing(self._runner.run(request, run)) as events:
            async for event in events:
                if isinstance(event, PromptComputed):
                    prompt = event
        if prompt is None or prompt.logprobs is None:
            raise Cancelled()
        return prompt


def _version_of(weights: ResidentVersion | None) -> int:
    return weights.key.version if weights else 0


def _check_continued(caller: Caller, request: SampleRequest) -> None:
    """Check that the caller may continue sequences, and that the weights that sampled their tokens are known.

    Raises:
        ScopeMissing: The caller is not a service of this deployment.
        InvalidField: The request names an adapter without an exact version.
    """
    require_internal(caller)
    if request.adapter is not None and request.adapter.exact is None:
        raise InvalidField('adapter.exact', 'must be set with `continued`: versions cannot be mixed')
