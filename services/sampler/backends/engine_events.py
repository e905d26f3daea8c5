"""Converts the library's events to the events of the port, for both engines."""

import math

import numpy as np

from twinkle.data_format import ProbeResult
from twinkle.sampler.engine import EngineEvent, PromptEvent, TokenEvent
from twinkle_services.sampler.domain.errors import AdapterMisfit
from twinkle_services.sampler.domain.generation import (
    GenerationEvent,
    GenerationRequest,
    PromptComputed,
    SequenceFinished,
    TokensSampled,
)


def events_of(event: EngineEvent, request: GenerationRequest) -> list[GenerationEvent]:
    """Convert an event of the library that belongs to `request`.

    Raises:
        AdapterMisfit: A log-probability is NaN, so the tokens cannot be trusted, or an embedding is not finite.
    """
    if not (all(map(_is_number, _token_logprobs(event, request))) and _is_embedding_finite(event)):
        name, version = (request.adapter.adapter.name, request.adapter.version) if request.adapter else ('', 0)
        raise AdapterMisfit(
            name,
            f'finite weights, but version {version} computes values that are NaN or infinite; use an earlier version',
        )
    if isinstance(event, PromptEvent):
        return [
            PromptComputed(
                token_ids=request.prompt_token_ids,
                logprobs=event.logprobs,
                top_logprobs=event.top_logprobs,
                probe=event.probe,
                cached_tokens=event.cached_tokens,
                version=event.version,
            )
        ]
    return _token_events(event)


def _token_logprobs(event: EngineEvent, request: GenerationRequest) -> list[float | None]:
    if isinstance(event, PromptEvent):
        return [*(event.logprobs or []), *_probed_logprobs(event.probe or ProbeResult(), request)]
    return [entry[0][1] for entry in event.logprobs]


def _probed_logprobs(result: ProbeResult, request: GenerationRequest) -> list[float]:
    """Return the log-probabilities of the requested and the drawn tokens, without unused entries, which are NaN."""
    found: list[float] = []
    probe = request.params.prompt_probe
    if probe is not None and probe.target_token_ids is not None and result.target_logprobs is not None:
        found += result.target_logprobs[probe.target_token_ids >= 0].tolist()
    if result.drawn_logprobs is not None:
        found += result.drawn_logprobs.reshape(-1).tolist()
    return found


def _is_embedding_finite(event: EngineEvent) -> bool:
    probe = event.probe if isinstance(event, PromptEvent) else None
    return probe is None or probe.embedding is None or bool(np.isfinite(probe.embedding).all())


def _is_number(value: float | None) -> bool:
    return value is None or not math.isnan(value)


def _token_events(event: TokenEvent) -> list[GenerationEvent]:
    index = event.sequence_index
    events: list[GenerationEvent] = []
    if event.tokens:
        sampled = TokensSampled(
            sequence_index=index,
            tokens=event.tokens,
            logprobs=event.logprobs,
            text=event.text,
            version=event.version,
        )
        events.append(sampled)
    if event.stop_reason is not None:
        text = '' if event.tokens else event.text
        finished = SequenceFinished(
            sequence_index=index,
            stop_reason=event.stop_reason,
            version_spans=event.version_spans,
            text=text,
            routed_experts=event.routed_experts,
        )
        events.append(finished)
    return events
