"""Trace files, to which each process appends its finished spans, and the memory of GPUs."""

from twinkle.telemetry.listing import is_listed
from twinkle.telemetry.memory import CudaMemory, gpu_memory, summed
from twinkle.telemetry.span_file import SpanFileExporter, SpanRecord, is_span_id, parse_span, read_spans
from twinkle.telemetry.trace_events import trace_events

__all__ = [
    'CudaMemory',
    'SpanFileExporter',
    'SpanRecord',
    'gpu_memory',
    'is_listed',
    'is_span_id',
    'parse_span',
    'read_spans',
    'summed',
    'trace_events',
]
