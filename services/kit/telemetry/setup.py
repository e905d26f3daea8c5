"""Configuration of logging, metrics and tracing at the start of a process."""

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

import structlog
from opentelemetry import metrics, trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from pydantic import BaseModel, ConfigDict, Field

from twinkle.telemetry import SpanFileExporter
from twinkle_services.kit.telemetry.log_file import LogFile
from twinkle_services.kit.telemetry.spans import log_ids


class LogStream:
    """Text stream for log lines. Lines that cannot be written are dropped.

    A log file is usually on the same disk as the state. If the disk is full, a log call must neither fail the operation
    that it describes nor end the calling thread.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class TelemetryConfig(BaseModel):
    """Settings of logs, metrics and traces."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    log_level: str = Field(default='INFO', pattern='^(DEBUG|INFO|WARNING|ERROR)$')
    """Lowest level that is logged."""
    is_log_json: bool = False
    """Whether log lines are JSON objects instead of text."""
    log_file: Path | None = None
    """File to which standard output and standard error are appended. Unset: they are not redirected."""
    log_file_bytes: int = Field(default=32 << 20, ge=4096)
    """Maximum size of `log_file`. A larger file is copied to `<name>.old`, replacing any previous copy, and emptied."""
    trace_dir: Path | None = None
    """Folder to which spans are appended as JSON lines, for `twinkle trace`. Unset: spans are not written."""
    otlp_endpoint: str = ''
    """OTLP/gRPC collector of spans, such as `http://127.0.0.1:4317`. Empty: the variable `OTEL_EXPORTER_OTLP_ENDPOINT`
    applies. If that variable is set, metrics are sent to its collector, too."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the admin server on loopback; `admin_listen` accepts any address. 0: `admin_listen` applies."""


def start_telemetry(config: TelemetryConfig, *, service: str) -> None:
    """Configure telemetry. Call it once, before the first log line.

    Raises:
        OSError: The log file cannot be opened, or the trace folder cannot be created.
    """
    if config.log_file is not None:
        LogFile(config.log_file, limit_bytes=config.log_file_bytes).open()
    _start_logs(config, service=service)
    resource = Resource.create({'service.name': f'twinkle-{service}'})
    _start_traces(config, service=service, resource=resource)
    _start_metrics(resource)


def stop_telemetry() -> None:
    """Send buffered spans and the last metrics, and stop tracing and metrics."""
    for provider in (trace.get_tracer_provider(), metrics.get_meter_provider()):
        if isinstance(provider, TracerProvider | MeterProvider):
            provider.shutdown()


def _start_logs(config: TelemetryConfig, *, service: str) -> None:
    level = getattr(logging, config.log_level)
    stream = cast(TextIO, LogStream(sys.stderr))
    common = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt='iso'),
        log_ids,
    ]
    renderers = _renderers(is_json=config.is_log_json)
    structlog.configure(
        processors=[*common, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=stream),
    )
    structlog.contextvars.bind_contextvars(service=service)
    # Libraries use the loggers of the standard library; their lines get the same format.
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler])


def _renderers(*, is_json: bool) -> list[structlog.typing.Processor]:
    if is_json:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    # Rich tracebacks would print local variables, which may contain secrets.
    return [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)]


def _start_traces(config: TelemetryConfig, *, service: str, resource: Resource) -> None:
    processors: list[SpanProcessor] = []
    if config.trace_dir is not None:
        exporter = SpanFileExporter(config.trace_dir / f'{service}.jsonl', service=service)
        processors.append(BatchSpanProcessor(exporter, schedule_delay_millis=500))
    if config.otlp_endpoint or _is_sent('TRACES'):
        # Imported only when used, because it costs memory.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

        # Without an address, the exporter reads the variables.
        processors.append(BatchSpanProcessor(OTLPSpanExporter(config.otlp_endpoint or None)))
    if not processors:
        # Spans that nothing receives are not recorded.
        return
    provider = TracerProvider(resource=resource)
    for processor in processors:
        provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)


def _is_sent(signal: str) -> bool:
    """Return whether a standard variable of OpenTelemetry names a collector for 'TRACES' or 'METRICS'."""
    names = ('OTEL_EXPORTER_OTLP_ENDPOINT', f'OTEL_EXPORTER_OTLP_{signal}_ENDPOINT')
    return any(os.environ.get(name) for name in names)


def _start_metrics(resource: Resource) -> None:
    # The labels with the scope would repeat the name of the library in each series.
    readers: list[MetricReader] = [PrometheusMetricReader(scope_info_enabled=False)]
    if _is_sent('METRICS'):
        # Imported only when used, because it costs memory.
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter  # noqa: PLC0415

        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    metrics.set_meter_provider(MeterProvider(readers, resource=resource))
