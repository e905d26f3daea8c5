"""One prompt through the engine, with everything that every sampling verb has to check and hold."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass

from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import BaseModelNotFound, InvalidField
from services.sampler.application.admission import Admission
from services.sampler.application.version_store import VersionStore
from services.sampler.domain.adapter import AdapterChoice, VersionKey
from services.sampler.domain.generation import (
    GenerationEvent,
    GenerationRequest,
    Prompt,
    PromptComputed,
    SequenceEnded,
    check_fits,
)
from services.sampler.domain.running_requests import RunningRequest, RunningRequests
from services.sampler.ports import SamplerEngine
from twinkle.data_format import SamplingParams, StopReason


@dataclass(frozen=True, kw_only=True)
class SampleCommand:
    """What a sampling verb is asked for, its fields checked."""

    request_id: str
    base_model: str
    adapter: AdapterChoice | None
    """None: the base model alone, on purpose."""
    prompts: tuple[Prompt, ...]
    """At least one."""
    params: SamplingParams


class Generate:
    """The steps that the sampling verbs share."""

    def __init__(
        self, engine: SamplerEngine, versions: VersionStore, admission: Admission, requests: RunningRequests
    ) -> None:
        """Run prompts in `engine`, with versions, places and a register that all verbs share."""
        self._engine = engine
        self._versions = versions
        self._admission = admission
        self._requests = requests

    def authorise(self, caller: Caller, base_model: str) -> None:
        """Refuse a caller or a base model that has no business here.

        Raises:
            ScopeMissing: the caller may not sample.
            BaseModelNotFound: another base model is served.
            EnginePaused, QueueFull: not now.
        """
        require_scope(caller, 'sample')
        served = self._engine.facts.base_model
        if base_model != served:
            raise BaseModelNotFound(base_model, (served,))
        self._admission.check_open(caller.tenant_id)

    async def encode(self, prompt: Prompt, params: SamplingParams, *, field: str = 'prompt') -> tuple[int, ...]:
        """Return the prompt as tokens that fit the context.

        Args:
            prompt: to be encoded.
            params: bounds the new tokens.
            field: path of the prompt in the request, for errors.

        Raises:
            InvalidField: it cannot be encoded.
            ContextExceeded: it is too long.
        """
        try:
            token_ids = await self._engine.encode(prompt)
        except InvalidField as error:
            raise InvalidField(f'{field}.{error.field}', error.problem) from error
        check_fits(len(token_ids), params, self._engine.facts)
        return token_ids

    @contextmanager
    def running(self, caller: Caller, request_id: str) -> Iterator[RunningRequest]:
        """Register a request for as long as it is served, so that Abort finds it.

        Raises:
            RequestIdTaken: the caller has one of that id running.
        """
        request = self._requests.begin(caller.tenant_id, request_id)
        try:
            yield request
        finally:
            self._requests.end(request)

    @asynccontextmanager
    async def version(self, caller: Caller, choice: AdapterChoice | None) -> AsyncGenerator[VersionKey | None, None]:
        """Hold the version `choice` asks for; None stays None.

        Raises:
            NotFound, VersionNotReady, AdapterMisfit, InvalidField: as `VersionStore.lease`.
        """
        if choice is None:
            yield None
            return
        async with self._versions.lease(caller, choice) as resident:
            yield resident.key

    async def __call__(
        self,
        request: RunningRequest,
        token_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        adapter: VersionKey | None,
        prompt_index: int = 0,
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Wait for a place, run one prompt of a request and yield what it brings.

        Raises:
            ContextExceeded, InvalidField: as `SamplerEngine.generate`.
        """
        # Running requests are unique, so their prompts are, too.
        engine_request_id = f'{request.tenant_id}/{request.request_id}/{prompt_index}'
        generation = GenerationRequest(
            request_id=engine_request_id, prompt_token_ids=token_ids, params=params, adapter=adapter
        )
        async with self._admission.turn(request):
            if request.is_aborted:
                for event in _never_begun(generation):
                    yield event
                return
            request.engine_request_ids.add(engine_request_id)
            try:
                async with aclosing(self._engine.generate(generation)) as events:
                    async for event in events:
                        yield event
            finally:
                request.engine_request_ids.discard(engine_request_id)


def _never_begun(generation: GenerationRequest) -> list[GenerationEvent]:
    """Return the events of a prompt that was aborted before its turn."""
    ended = [
        SequenceEnded(sequence_index=index, stop_reason=StopReason.ABORT)
        for index in range(generation.params.num_samples)
    ]
    return [PromptComputed(token_ids=generation.prompt_token_ids), *ended]
