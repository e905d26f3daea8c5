"""Keeps the program's own spans beside those of the services, so that a trace can be shown whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from twinkle.telemetry import SpanFileExporter


@contextmanager
def tracing_to(folder: Path) -> Iterator[None]:
    """Write the spans of the block into `folder`; does nothing where the program traces already."""
    if isinstance(trace.get_tracer_provider(), TracerProvider):
        yield
        return
    provider = TracerProvider(resource=Resource.create({'service.name': 'twinkle-client'}))
    exporter = SpanFileExporter(folder / 'client.jsonl', service='client')
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()
