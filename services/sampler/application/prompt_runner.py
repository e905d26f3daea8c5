"""Steps shared by all sampling methods: authorize, encode, lease weights, wait for a slot, and run one prompt."""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Self

from twinkle.data_format import SamplingParams, StopReason
from twinkle_services.kit.caller import Caller, require_scope
from twinkle_services.kit.errors import BaseModelNotFound, InvalidField
from twinkle_services.kit.telemetry import measures, spans
from twinkle_services.sampler.application.admission import Admission
from twinkle_services.sampler.application.versions_protocol import Versions
from twinkle_services.sampler.domain.adapter import AdapterChoice
from twinkle_services.sampler.domain.generation import (
    ChatPrompt,
    GenerationEvent,
    GenerationRequest,
    Prompt,
    PromptComputed,
    SequenceFinished,
    SequenceSoFar,
    TokensSampled,
    check_fits,
    spans_of,
)
from twinkle_services.sampler.domain.residency import ResidentVersion
from twinkle_services.sampler.domain.running_requests import RunningRequest, RunningRequests
from twinkle_services.sampler.ports import SamplerEngine


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
            with spans.span('template' if isinstance(prompt, ChatPrompt) else 'tokenize') as span:
                token_ids = await self._engine.encode(prompt)
                spans.annotate(span, token_count=len(token_ids))
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
        """Lease the version that `choice` selects until this block ends; yield None for the base model alone.

        Raises:
            BaseModelNotFound: No adapter is selected, and this sampler serves a full-parameter run.
            NotFound, Unavailable, DataLoss, AdapterMisfit, InvalidField, NotSupportedHere: See `Versions.lease`.
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
        with _PromptMeter(generation, self._engine.facts.base_model) as meter:
            async with self._admission.slot(request):
                meter.start()
                if request.is_aborted:
                    for event in _aborted_events(generation, run.weights):
                        yield event
                    return
                request.engine_request_ids.add(engine_request_id)
                try:
                    async with aclosing(self._engine.generate(generation)) as events:
                        async for event in events:
                            meter.note(event)
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


class _PromptMeter:
    """Measures the tokens of one prompt and their times, as metrics and as a span."""

    def __init__(self, request: GenerationRequest, base_model: str) -> None:
        self._sequence_count = request.open_sequences
        self._begin = self._first = self._last = time.perf_counter()
        self._token_count = 0
        self._stop_reasons: list[str] = []
        self._span = spans.begin('generate')
        if self._span.is_recording():
            self._span.set_attributes(_request_attributes(request, base_model))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Record the number of sampled tokens and the mean time between tokens of a sequence, and end the span."""
        measures.sampled_tokens.add(self._token_count)
        later_tokens = self._token_count / max(self._sequence_count, 1) - 1
        if later_tokens >= 1:
            measures.token_seconds.record((self._last - self._first) / later_tokens)
        self._end_span()

    def start(self) -> None:
        """Record the wait for a slot of the engine."""
        if self._span.is_recording():
            spans.add_past('queue', self._span.get_span_context(), begin_age=time.perf_counter() - self._begin)

    def note(self, event: GenerationEvent) -> None:
        """Count the tokens of an event."""
        if isinstance(event, TokensSampled):
            self._last = time.perf_counter()
            if not self._token_count:
                self._first = self._last
                measures.first_token_seconds.record(self._first - self._begin)
            self._token_count += len(event.tokens)
        elif isinstance(event, SequenceFinished):
            self._stop_reasons.append(event.stop_reason.value)
        else:
            measures.prompt_tokens.add(len(event.token_ids))
            measures.cached_tokens.add(event.cached_tokens)

    def _end_span(self) -> None:
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    'gen_ai.usage.output_tokens': self._token_count,
                    'gen_ai.response.finish_reasons': self._stop_reasons,
                    'gen_ai.response.time_to_first_chunk': self._first - self._begin,
                }
            )
            self._span.end()


def _request_attributes(request: GenerationRequest, base_model: str) -> dict[str, str | int | float]:
    """Return the attributes of a request, with the names of OpenTelemetry's conventions for generative models."""
    params, adapter = request.params, request.adapter
    found: dict[str, str | int | float | None] = {
        'gen_ai.operation.name': 'text_completion',
        'gen_ai.provider.name': 'twinkle',
        'gen_ai.request.model': base_model,
        'gen_ai.request.choice.count': params.num_samples,
        'gen_ai.request.max_tokens': params.max_tokens,
        'gen_ai.request.temperature': params.temperature,
        'gen_ai.request.top_p': params.top_p,
        'gen_ai.usage.input_tokens': len(request.prompt_token_ids),
        'twinkle.adapter_id': adapter.adapter.name if adapter else None,
        'twinkle.version': adapter.version if adapter else None,
    }
    return {name: value for name, value in found.items() if value is not None}


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
