"""Writes the client's spans to the folder with the services' spans, or sends them to a collector."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from twinkle.telemetry import SpanFileExporter


class _Switch(SpanProcessor):
    """Forwards spans to the current target.

    A process sets its tracer provider once, but may open and close trace files several times.
    """

    def __init__(self) -> None:
        self.target: SpanProcessor | None = None

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Forward the start of a span."""
        if self.target is not None:
            self.target.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Forward the end of a span."""
        if self.target is not None:
            self.target.on_end(span)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Flush the target; return whether that succeeded in time."""
        return self.target is None or self.target.force_flush(timeout_millis)


_switch = _Switch()
_own = TracerProvider(resource=Resource.create({'service.name': 'twinkle-client'}))
_own.add_span_processor(_switch)


@contextmanager
def tracing_to(folder: Path) -> Iterator[None]:
    """Write the spans of the block into `folder`; do nothing in a nested block, or if the program traces elsewhere."""
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


@cache
def export_from_environment() -> None:
    """Send all spans to the collector that OpenTelemetry's variables name, unless the program has other tracing."""
    names = ('OTEL_EXPORTER_OTLP_ENDPOINT', 'OTEL_EXPORTER_OTLP_TRACES_ENDPOINT')
    if not any(os.environ.get(name) for name in names) or not _is_provider_ours():
        return
    # Imported only when used, because it costs memory.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    _own.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))


def _is_provider_ours() -> bool:
    """Return whether the process uses this module's tracer provider, installing it if necessary."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(_own)
    return trace.get_tracer_provider() is _own
