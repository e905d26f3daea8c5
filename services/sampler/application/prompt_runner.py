"""Steps shared by all sampling methods: authorize, encode, lease weights, wait for a slot, and run one prompt."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass

from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import BaseModelNotFound, InvalidField
from services.sampler.application.admission import Admission
from services.sampler.application.versions_protocol import Versions
from services.sampler.domain.adapter import AdapterChoice
from services.sampler.domain.generation import (
    GenerationEvent,
    GenerationRequest,
    Prompt,
    PromptComputed,
    SequenceFinished,
    SequenceSoFar,
    check_fits,
    spans_of,
)
from services.sampler.domain.residency import ResidentVersion
from services.sampler.domain.running_requests import RunningRequest, RunningRequests
from services.sampler.ports import SamplerEngine
from twinkle.data_format import SamplingParams, StopReason


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """A validated request to sample or score prompts."""

    request_id: str
    base_model: str
    adapter: AdapterChoice | None
    """Adapter to sample from; None for the base model alone."""
    prompts: tuple[Prompt, ...]
    """Prompts to run, at least one."""
    params: SamplingParams
    continued: tuple[SequenceSoFar, ...] = ()
    """Sequences that another sampler began, one entry per sequence of the single prompt, in order; empty for a new
    request."""


@dataclass(frozen=True, kw_only=True)
class PromptRun:
    """One prompt of a request, ready for the engine."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    weights: ResidentVersion | None
    """Version that is leased while the prompt runs; None for the base model alone."""
    prompt_index: int = 0
    continued: tuple[SequenceSoFar, ...] = ()


class PromptRunner:
    """Runs prompts in one engine."""

    def __init__(
        self,
        engine: SamplerEngine,
        versions: Versions,
        admission: Admission,
        requests: RunningRequests,
        *,
        is_base_prefix_shared: bool = False,
    ) -> None:
        """Create a runner.

        Args:
            engine: Engine that samples.
            versions: Versions of weights to lease.
            admission: Slots of the engine.
            requests: Register of running requests, which `EngineControl.abort` reads.
            is_base_prefix_shared: Whether tenants share cached prefixes of the base model.
        """
        self._engine = engine
        self._versions = versions
        self._admission = admission
        self._requests = requests
        self._is_base_prefix_shared = is_base_prefix_shared

    def authorize(self, caller: Caller, base_model: str) -> None:
        """Check that a request can be served.

        Raises:
            ScopeMissing: The caller may not sample.
            BaseModelNotFound: This sampler serves another base model.
            EnginePaused: The engine is paused or sleeps.
            QueueFull: The tenant has too many waiting prompts.
        """
        require_scope(caller, 'sample')
        self.check_base_model(base_model)
        self._admission.check_open(caller.tenant_id)

    def check_base_model(self, base_model: str) -> None:
        """Check that this sampler serves a base model.

        Raises:
            BaseModelNotFound: This sampler serves another base model.
        """
        served = self._engine.facts.base_model
        if base_model != served:
            raise BaseModelNotFound(base_model, (served,))

    async def encode(self, prompt: Prompt, params: SamplingParams, *, field: str = 'prompt') -> tuple[int, ...]:
        """Return the prompt's tokens, after checking that they fit the context.

        Args:
            prompt: Prompt to encode.
            params: Sampling parameters, which limit the number of new tokens.
            field: Path of the prompt in the request, for error messages.

        Raises:
            InvalidField: The prompt cannot be encoded, or a parameter does not fit the prompt or the engine.
            ContextExceeded: The prompt and its new tokens do not fit the context.
        """
        try:
            token_ids = await self._engine.encode(prompt)
        except InvalidField as error:
            raise InvalidField(f'{field}.{error.field}', error.problem) from error
        check_fits(len(token_ids), params, self._engine.facts)
        return token_ids

    @contextmanager
    def running(self, caller: Caller, request_id: str) -> Iterator[RunningRequest]:
        """Register a request within this block, so that it can be aborted.

        Raises:
            RequestIdTaken: The caller already has a running request with that id.
        """
        request = self._requests.begin(caller.tenant_id, request_id)
        try:
            yield request
        finally:
            self._requests.end(request)

    @asynccontextmanager
    async def lease(self, caller: Caller, choice: AdapterChoice | None) -> AsyncGenerator[ResidentVersion | None, None]:
        """Lease the version that `choice` selects within this block; yield None for the base model alone.

        Raises:
            BaseModelNotFound: No adapter is selected, and this sampler serves a full-parameter run.
            NotFound, Unavailable, AdapterMisfit, InvalidField, NotSupportedHere: See `Versions.lease`.
        """
        if choice is None:
            self._versions.check_base()
            yield None
            return
        async with self._versions.lease(caller, choice) as resident:
            yield resident

    async def run(self, request: RunningRequest, run: PromptRun) -> AsyncGenerator[GenerationEvent, None]:
        """Wait for a slot, run one prompt and yield its events.

        Raises:
            DomainError: An error of `SamplerEngine.check_form` or `SamplerEngine.generate`.
        """
        # A tenant's running requests have unique ids, so this id is unique in the engine.
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
            # Checked before waiting for a slot, so that expensive grammars of one tenant do not occupy slots.
            await self._engine.check_form(run.params.structured_output, request.tenant_id)
        async with self._admission.slot(request):
            if request.is_aborted:
                for event in _aborted_events(generation, run.weights):
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
        """Return the salt that separates cached prefixes by tenant and by the digest of the weights.

        Without the salt, the latency of a prompt would reveal the prompts of other tenants.
        """
        if weights is not None:
            return f'{tenant_id}/{weights.digest}'
        return '' if self._is_base_prefix_shared else tenant_id


def _aborted_events(generation: GenerationRequest, weights: ResidentVersion | None) -> list[GenerationEvent]:
    """Return the events of a prompt that was aborted while it waited for a slot."""
    if not generation.continued:
        finished = [
            SequenceFinished(sequence_index=index, stop_reason=StopReason.ABORT)
            for index in range(generation.params.num_samples)
        ]
        return [PromptComputed(token_ids=generation.prompt_token_ids), *finished]
    version = weights.key.version if weights else 0
    return [
        SequenceFinished(
            sequence_index=so_far.sequence_index,
            stop_reason=StopReason.ABORT,
            version_spans=spans_of(version, len(so_far.token_ids)),
        )
        for so_far in generation.continued
        if not so_far.is_finished
    ]
