"""Events that end a sequence without a new token."""

from twinkle.data_format import StopReason, VersionSpan
from twinkle.sampler.engine.request import EngineRequest, Experts, TokenEvent
from twinkle.sampler.engine.sequence import SampleGroup


def last_event(
    request: EngineRequest,
    sequence_index: int,
    reason: StopReason,
    *,
    token_count: int = 0,
    text: str = '',
    experts: Experts | None = None,
) -> TokenEvent:
    """Return the event that ends a sequence of `token_count` tokens without a new token."""
    return TokenEvent(
        request_id=request.request_id,
        sequence_index=sequence_index,
        text=text,
        version=request.version,
        stop_reason=reason,
        version_spans=version_spans(request, token_count),
        routed_experts=experts,
    )


def aborted_event(group: SampleGroup, sequence_index: int) -> TokenEvent:
    """Return the last event of a sequence that was aborted before this engine started it."""
    state = group.replays.get(sequence_index)
    count, text = (len(state.tokens), state.stop_detector.release()) if state else (0, '')
    return last_event(group.request, sequence_index, StopReason.ABORT, token_count=count, text=text)


def version_spans(request: EngineRequest, token_count: int) -> list[VersionSpan]:
    """Return the version span of a sequence's tokens; an empty list without tokens."""
    if token_count == 0:
        return []
    return [VersionSpan(version=request.version, begin_token=0, end_token=token_count)]
