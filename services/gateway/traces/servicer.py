"""Serves `TraceService`, and converts the messages of its contract."""

# ruff: noqa: N802 (the methods have the contract's names)

import asyncio
from collections.abc import Iterable
from datetime import timedelta
from functools import partial

from google.protobuf.timestamp_pb2 import Timestamp

from twinkle.api.gateway.v1 import trace_service_pb2 as messages
from twinkle.api.gateway.v1 import trace_service_pb2_grpc
from twinkle.telemetry import SpanRecord, is_span_id
from twinkle_services.gateway.page_tokens import next_token, page_from_proto, query_of
from twinkle_services.gateway.traces.summaries import MAX_LISTED_NAMES, TraceFilter, TraceSummary
from twinkle_services.gateway.traces.traces import Traces, VisibleTrace
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import (
    MAX_ID_LENGTH,
    MAX_TTL,
    duration_from_proto,
    duration_to_proto,
    not_negative,
    text_from_proto,
)

_KINDS = {name.removeprefix('SPAN_KIND_').lower(): number for name, number in messages.SpanKind.items()}


class TraceServicer(trace_service_pb2_grpc.TraceServiceServicer):
    """Implements `TraceService`."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces

    async def ListTraces(self, request: messages.ListTracesRequest, context: Context) -> messages.ListTracesResponse:
        query, wanted = query_of(request), trace_filter_from_proto(request)
        page = page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._traces.list(current_caller(), page, wanted)
        convert = partial(summary_to_proto, is_all_tenants=request.is_all_tenants)
        traces = await asyncio.to_thread(lambda: [*map(convert, listing.items)])
        return messages.ListTracesResponse(traces=traces, next_page_token=next_token(listing.next_cursor, query=query))

    async def GetTrace(self, request: messages.GetTraceRequest, context: Context) -> messages.GetTraceResponse:
        trace_id, tenant_id = trace_id_from_proto(request.trace_id), _tenant_of(request.is_all_tenants)
        trace = await self._traces.get(current_caller(), trace_id, tenant_id)
        return await asyncio.to_thread(trace_to_proto, trace, is_all_tenants=request.is_all_tenants)


def trace_filter_from_proto(request: messages.ListTracesRequest) -> TraceFilter:
    """Return the filter for traces.

    Raises:
        InvalidField: an id has too many characters or control characters, a number or the duration is out of range, or
            a number is given without its run.
    """
    number = not_negative(request.sequence_number, 'sequence_number')
    if number and not request.run_id:
        raise InvalidField('sequence_number', 'must be given together with run_id')
    return TraceFilter(
        tenant_id=_tenant_of(request.is_all_tenants),
        request_id=text_from_proto(request.request_id, 'request_id', limit=MAX_ID_LENGTH),
        run_id=text_from_proto(request.run_id, 'run_id', limit=MAX_ID_LENGTH),
        sequence_number=number,
        min_duration=duration_from_proto(request.min_duration, 'min_duration', minimum=timedelta(), maximum=MAX_TTL),
        is_error=request.is_error if request.HasField('is_error') else None,
        is_background_included=request.is_background_included,
    )


def trace_id_from_proto(trace_id: str) -> str:
    """Return the id of a trace.

    Raises:
        InvalidField: the id does not have 32 hexadecimal digits in lower case.
    """
    if not is_span_id(trace_id, digits=32):
        raise InvalidField('trace_id', f'must be 32 hexadecimal digits in lower case, got {trace_id[:64]!r}')
    return trace_id


def summary_to_proto(trace: TraceSummary, *, is_all_tenants: bool) -> messages.Trace:
    """Convert a summary; tenants are included if `is_all_tenants`."""
    return messages.Trace(
        trace_id=trace.trace_id,
        name=trace.name,
        service=trace.service,
        start_time=_timestamp(trace.begin_ns),
        duration=duration_to_proto(timedelta(microseconds=(trace.end_ns - trace.begin_ns) / 1000)),
        span_count=trace.span_count,
        is_error=trace.is_error,
        services=sorted(trace.services),
        verbs=trace.verbs,
        run_ids=_first(trace.run_ids),
        request_ids=_first(trace.request_ids),
        tenant_ids=_first(trace.tenant_ids) if is_all_tenants else (),
    )


def trace_to_proto(trace: VisibleTrace, *, is_all_tenants: bool) -> messages.GetTraceResponse:
    """Convert a trace with its spans; tenants are included if `is_all_tenants`."""
    return messages.GetTraceResponse(
        trace=summary_to_proto(trace.summary, is_all_tenants=is_all_tenants),
        spans=map(span_to_proto, trace.spans),
        is_truncated=trace.is_truncated,
    )


def span_to_proto(span: SpanRecord) -> messages.Span:
    return messages.Span(
        span_id=span.span_id,
        parent_span_id=span.parent_id,
        service=span.service,
        name=span.name,
        kind=messages.SpanKind.ValueType(_KINDS.get(span.kind, 0)),
        start_time=_timestamp(span.start_ns),
        end_time=_timestamp(span.end_ns),
        is_error=span.is_error,
        attributes=span.attributes,
        links=[messages.SpanLink(trace_id=link[:32], span_id=link[33:]) for link in span.links],
    )


def _tenant_of(is_all_tenants: bool) -> str | None:  # noqa: FBT001 (private)
    return None if is_all_tenants else current_caller().tenant_id


def _first(names: Iterable[str]) -> list[str]:
    return sorted(names)[:MAX_LISTED_NAMES]


def _timestamp(time_ns: int) -> Timestamp:
    seconds, nanos = divmod(time_ns, 10**9)
    return Timestamp(seconds=seconds, nanos=nanos)
