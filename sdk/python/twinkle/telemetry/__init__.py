"""Traces in files: every process appends its spans, one reader puts them together."""

from twinkle.telemetry.span_file import SpanFileExporter, SpanRecord, read_spans

__all__ = ['SpanFileExporter', 'SpanRecord', 'read_spans']
