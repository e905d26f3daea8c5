"""Trace files: each process appends its finished spans to a file, and `read_spans` reads them all."""

from twinkle.telemetry.span_file import SpanFileExporter, SpanRecord, read_spans

__all__ = ['SpanFileExporter', 'SpanRecord', 'read_spans']
