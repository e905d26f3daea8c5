"""Trace files: each process appends its finished spans to a file, and `read_spans` reads them all."""

from twinkle.telemetry.listing import is_listed
from twinkle.telemetry.span_file import SpanFileExporter, SpanRecord, is_span_id, parse_span, read_spans
from twinkle.telemetry.trace_events import trace_events

__all__ = ['SpanFileExporter', 'SpanRecord', 'is_listed', 'is_span_id', 'parse_span', 'read_spans', 'trace_events']
