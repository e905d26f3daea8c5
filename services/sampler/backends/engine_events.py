"""Converts the library's events to the events of the port, for both engines."""

import math

from services.sampler.domain.errors import AdapterMisfit
from services.sampler.domain.generation import (
    GenerationEvent,
    GenerationRequest,
    PromptComputed,
    SequenceFinished,
    TokensSampled,
)
from twinkle.sampler.engine import EngineEvent, PromptEvent, TokenEvent


def events_of(event: EngineEvent, request: GenerationRequest) -> list[GenerationEvent]:
    """Convert an event of the library that belongs to `request`.

    Raises:
        AdapterMisfit: A log-probability is NaN, so the tokens cannot be trusted.
    """
    if not all(map(_is_number, _token_logprobs(event))):
        name, version = (request.adapter.adapter.name, request.adapter.version) if request.adapter else ('', 0)
        raise AdapterMisfit(name, f'finite weights; version {version} computes log-probabilities that are NaN')
    if isinstance(event, PromptEvent):
        return [
            PromptComputed(
                token_ids=request.prompt_token_ids,
                logprobs=event.logprobs,
                top_logprobs=event.top_logprobs,
                cached_tokens=event.cached_tokens,
            )
        ]
    return _token_events(event)


def _token_logprobs(event: EngineEvent) -> list[float | None]:
    if isinstance(event, PromptEvent):
        return event.logprobs or []
    return [entry[0][1] for entry in event.logprobs]


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
            sequence_index=index, stop_reason=event.stop_reason, version_spans=event.version_spans, text=text
        )
        events.append(finished)
    return events
