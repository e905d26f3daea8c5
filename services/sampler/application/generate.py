"""One prompt through the engine, with everything that every sampling verb has to check and hold."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass

from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import BaseModelNotFound, InvalidField
from services.sampler.application.admission import Admission
from services.sampler.application.versions import Versions
from services.sampler.domain.adapter import AdapterChoice
from services.sampler.domain.generation import (
    GenerationEvent,
    GenerationRequest,
    Prompt,
    PromptComputed,
    SequenceEnded,
    SequenceSoFar,
    check_fits,
    spans_of,
)
from services.sampler.domain.residency import ResidentVersion
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
    continued: tuple[SequenceSoFar, ...] = ()
    """Empty, or one entry for each sequence of the only prompt, in order: another sampler began it."""


@dataclass(frozen=True, kw_only=True)
class PromptRun:
    """One prompt of a request, ready for the engine."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    weights: ResidentVersion | None
    """None: the base model alone. Leased for as long as the prompt runs."""
    prompt_index: int = 0
    continued: tuple[SequenceSoFar, ...] = ()


class Generate:
    """The steps that the sampling verbs share."""

    def __init__(
        self,
        engine: SamplerEngine,
        versions: Versions,
        admission: Admission,
        requests: RunningRequests,
        *,
        is_base_prefix_shared: bool = False,
    ) -> None:
        """Run prompts in `engine`, with versions, places and a register that all verbs share.

        Args:
            engine: samples.
            versions: leases weights.
            admission: hands out places.
            requests: where Abort finds them.
            is_base_prefix_shared: whether tenants find each other's prompts in the base model's prefix cache.
        """
        self._engine = engine
        self._versions = versions
        self._admission = admission
        self._requests = requests
        self._is_base_prefix_shared = is_base_prefix_shared

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
    async def version(
        self, caller: Caller, choice: AdapterChoice | None
    ) -> AsyncGenerator[ResidentVersion | None, None]:
        """Hold the version `choice` asks for; None stays None.

        Raises:
            NotFound, VersionNotReady, AdapterMisfit, InvalidField, NotSupportedHere: as `Versions.lease`.
        """
        if choice is None:
            self._versions.check_base()
            yield None
            return
        async with self._versions.lease(caller, choice) as resident:
            yield resident

    async def __call__(self, request: RunningRequest, run: PromptRun) -> AsyncGenerator[GenerationEvent, None]:
        """Wait for a place, run one prompt of a request and yield what it brings.

        Raises:
            ContextExceeded, InvalidField, NotSupportedHere: as `SamplerEngine.generate`.
        """
        # Running requests are unique, so their prompts are, too.
        engine_request_id = f'{request.tenant_id}/{request.request_id}/{run.prompt_index}'
        generation = GenerationRequest(
            request_id=engine_request_id,
            prompt_token_ids=run.token_ids,
            params=run.params,
            adapter=run.weights.key if run.weights and not run.weights.is_base else None,
            cache_salt=self._cache_salt(request.tenant_id, run.weights),
            continued=run.continued,
        )
        if run.params.structured_output is not None:
            # Before it takes a place: a tenant's costly forms are not to hold places that others wait for.
            await self._engine.check_form(run.params.structured_output, request.tenant_id)
        async with self._admission.turn(request):
            if request.is_aborted:
                for event in _never_begun(generation, run.weights):
                    yield event
                return
            request.engine_request_ids.add(engine_request_id)
            try:
                async with aclosing(self._engine.generate(generation)) as events:
                    async for event in events:
                        yield event
            finally:
                request.engine_request_ids.discard(engine_request_id)

    def _cache_salt(self, tenant_id: str, weights: ResidentVersion | None) -> str:
        """Return what separates cached prefixes: whose they are, and the very bytes that computed them.

        How long a prompt took would tell a tenant what others have asked.
        """
        if weights is not None:
            return f'{tenant_id}/{weights.digest}'
        return '' if self._is_base_prefix_shared else tenant_id


def _never_begun(generation: GenerationRequest, weights: ResidentVersion | None) -> list[GenerationEvent]:
    """Return the events of a prompt that was aborted before its turn."""
    if not generation.continued:
        ended = [
            SequenceEnded(sequence_index=index, stop_reason=StopReason.ABORT)
            for index in range(generation.params.num_samples)
        ]
        return [PromptComputed(token_ids=generation.prompt_token_ids), *ended]
    version = weights.key.version if weights else 0
    return [
        SequenceEnded(
            sequence_index=so_far.sequence_index,
            stop_reason=StopReason.ABORT,
            version_spans=spans_of(version, len(so_far.token_ids)),
        )
        for so_far in generation.continued
        if not so_far.is_finished
    ]
