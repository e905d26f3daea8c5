"""Keeps the program's own spans beside those of the services, so that a trace can be shown whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from twinkle.telemetry import SpanFileExporter


class _Switch(SpanProcessor):
    """Passes spans on to where they are written now: a program sets its provider once, and may trace many times."""

    def __init__(self) -> None:
        """Pass on to nobody."""
        self.target: SpanProcessor | None = None

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Pass on a beginning."""
        if self.target is not None:
            self.target.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Pass on an end."""
        if self.target is not None:
            self.target.on_end(span)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Have written what was passed on."""
        return self.target is None or self.target.force_flush(timeout_millis)


_switch = _Switch()
_own = TracerProvider(resource=Resource.create({'service.name': 'twinkle-client'}))
_own.add_span_processor(_switch)


@contextmanager
def tracing_to(folder: Path) -> Iterator[None]:
    """Write the spans of the block into `folder`; does nothing where the program traces already."""
    if _switch.target is not None or not _is_provider_ours():
        yield
        return
    exporter = SpanFileExporter(folder / 'client.jsonl', service='client')
    target = _switch.target = BatchSpanProcessor(exporter, schedule_delay_millis=500)
    try:
        yield
    finally:
        _switch.target = None
        target.shutdown()


def _is_provider_ours() -> bool:
    """Return whether the process traces through the switch, set up now where it does not trace at all."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(_own)
    return trace.get_tracer_provider() is _own
