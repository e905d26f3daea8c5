"""Internal spans of a call, which show its passes, reads and writes, and the time that it waits in queues.

A span is created only inside a recorded span, so nothing is computed while tracing is off. The names of its attributes
begin with `twinkle.`; callers themselves set attributes of OpenTelemetry's conventions.
"""

import contextvars
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context, attach

from twinkle_services.kit.errors import Code

Value = str | int | float | bool | Sequence[str]
SERVER_FAULTS = frozenset(
    {
        Code.UNKNOWN.name,
        Code.DEADLINE_EXCEEDED.name,
        Code.UNIMPLEMENTED.name,
        Code.INTERNAL.name,
        Code.UNAVAILABLE.name,
        Code.DATA_LOSS.name,
    }
)
"""Statuses of gRPC that mark a server span as failed; the others are faults of the client."""
MAX_LINKS = 32
"""Maximum number of links of a span."""
_tracer = trace.get_tracer('twinkle')


def current() -> trace.SpanContext | None:
    """Return the context of the current span; None if the span is not recorded."""
    span = trace.get_current_span()
    return span.get_span_context() if span.is_recording() else None


@contextmanager
def span(name: str, **attributes: Value) -> Iterator[trace.Span]:
    """Record the block as a child of the current span. Do not use it around a `yield` of an asynchronous generator."""
    if current() is None:
        yield trace.INVALID_SPAN
        return
    with _tracer.start_as_current_span(
        name, attributes=_named(attributes), record_exception=False, set_status_on_exception=False
    ) as opened:
        yield opened


@contextmanager
def root_span(name: str, **attributes: Value) -> Iterator[trace.Span]:
    """Record the block as a separate trace, for work in the background that outlives the call that began it."""
    with _tracer.start_as_current_span(name, context=Context(), attributes=_named(attributes)) as opened:
        yield opened


def separate_trace() -> contextvars.Context:
    """Return a copy of the current context without a span, for a task that outlives the call that began it."""
    copied = contextvars.copy_context()
    copied.run(attach, Context())
    return copied


def begin(name: str, **attributes: Value) -> trace.Span:
    """Return a child of the current span that the caller ends; it does not become the current span."""
    if current() is None:
        return trace.INVALID_SPAN
    return _tracer.start_span(name, attributes=_named(attributes))


def annotate(recorded: trace.Span, **attributes: Value) -> None:
    """Set attributes of a span, if it is recorded."""
    recorded.set_attributes(_named(attributes))


def add_past(
    name: str,
    parent: trace.SpanContext,
    *,
    begin_age: float,
    end_age: float = 0.0,
    links: Sequence[trace.SpanContext] = (),
    **attributes: Value,
) -> None:
    """Record a span that has ended.

    Args:
        name: Name of the span.
        parent: Parent of the span.
        begin_age: Seconds since the span began.
        end_age: Seconds since the span ended.
        links: Other spans that shared the work of the span; at most `MAX_LINKS` are recorded.
        attributes: Attributes without the prefix.
    """
    now = time.time_ns()
    added = _tracer.start_span(
        name,
        context=trace.set_span_in_context(trace.NonRecordingSpan(parent)),
        attributes=_named(attributes),
        links=[trace.Link(link) for link in links[:MAX_LINKS]],
        start_time=now - int(begin_age * 1e9),
    )
    added.end(now - int(end_age * 1e9))


def log_ids(logger: object, method: str, entry: Mapping[str, object]) -> Mapping[str, object]:
    """Add `trace_id` and `span_id` of the current span to a log line. This is a processor of structlog."""
    del logger, method
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return entry
    ids = {'trace_id': trace.format_trace_id(context.trace_id), 'span_id': trace.format_span_id(context.span_id)}
    return {**entry, **ids}


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f'twinkle.{name}': value for name, value in attributes.items()}
