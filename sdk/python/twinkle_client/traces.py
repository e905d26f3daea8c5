"""Traces of calls across the services, which the server reads from its folder of traces."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from twinkle.api.gateway.v1 import trace_service_pb2 as pb
from twinkle.api.gateway.v1.trace_service_pb2_grpc import TraceServiceStub
from twinkle.telemetry import SpanRecord
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.rpc import LoopThread, remote_method

_MAX_PAGE = 1000


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """Summary of a trace, limited to the spans that the API key may see."""

    trace_id: str
    name: str
    """Name of the first span."""
    start_time: datetime
    """UTC."""
    duration: timedelta
    span_count: int
    is_error: bool
    services: Sequence[str]
    verbs: Sequence[str]
    """Verbs of the operations, such as 'ForwardBackward'."""
    run_ids: Sequence[str]
    request_ids: Sequence[str]
    tenant_ids: Sequence[str]
    """Tenants of the calls; empty unless the list includes all tenants."""


class Traces:
    """Lists and reads the traces of the API key's tenant.

    Args:
        are_all_tenants_shown: Whether to include the spans of all tenants, which needs the scope `operator`.
        client: Connection to the server. Defaults to the client initialized last.
    """

    def __init__(self, *, are_all_tenants_shown: bool = False, client: TwinkleClient | None = None) -> None:
        self._are_all_shown = are_all_tenants_shown
        self._connection = current_client(client).connection
        self._stub = TraceServiceStub(self._connection.channel)

    @property
    def loop_thread(self) -> LoopThread:
        """Event loop that runs the methods."""
        return self._connection.loop_thread

    @remote_method
    async def list(
        self,
        *,
        run_id: str = '',
        sequence_number: int = 0,
        request_id: str = '',
        min_duration: timedelta = timedelta(),
        limit: int = 50,
    ) -> Sequence[TraceSummary]:
        """Return the newest traces, without traces whose calls only read or only maintain a connection.

        Args:
            run_id: Run whose adapter the trace names. Empty: all.
            sequence_number: Number of an operation of the run. Needs `run_id`. 0: all.
            request_id: Request id of any call of the trace, even of a call that only reads. Empty: all.
            min_duration: Minimum duration of a trace.
            limit: Maximum number of traces. Values below 1 count as 1, and values above 1,000 as 1,000.

        Raises:
            UsageError: An argument is invalid.
            NotSupportedError: The server has no folder of traces.
            AccessError: The list includes all tenants, and the key lacks the scope `operator`.
        """
        request = pb.ListTracesRequest(
            page_size=min(max(limit, 1), _MAX_PAGE),
            run_id=run_id,
            sequence_number=sequence_number,
            request_id=request_id,
            is_background_included=bool(request_id),
            is_all_tenants=self._are_all_shown,
        )
        request.min_duration.FromTimedelta(min_duration)
        response = await self._connection.unary(self._stub.ListTraces, request)
        return [_summary(trace) for trace in response.traces]

    @remote_method
    async def get(self, trace_id: str) -> Sequence[SpanRecord]:
        """Return the spans of a trace, at most 5,000, in the order in which they began.

        Raises:
            UsageError: The id does not have 32 hexadecimal digits.
            NotSupportedError: The server has no folder of traces.
            AccessError: The spans of all tenants are requested, and the key lacks the scope `operator`.
            NotFoundError: The server stores no span of the trace that the key may see.
        """
        request = pb.GetTraceRequest(trace_id=trace_id, is_all_tenants=self._are_all_shown)
        response = await self._connection.unary(self._stub.GetTrace, request)
        return [_span(trace_id, span) for span in response.spans]


def _summary(trace: pb.Trace) -> TraceSummary:
    return TraceSummary(
        trace_id=trace.trace_id,
        name=trace.name,
        start_time=trace.start_time.ToDatetime(tzinfo=UTC),
        duration=trace.duration.ToTimedelta(),
        span_count=trace.span_count,
        is_error=trace.is_error,
        services=list(trace.services),
        verbs=list(trace.verbs),
        run_ids=list(trace.run_ids),
        request_ids=list(trace.request_ids),
        tenant_ids=list(trace.tenant_ids),
    )


def _span(trace_id: str, span: pb.Span) -> SpanRecord:
    return SpanRecord(
        trace_id=trace_id,
        span_id=span.span_id,
        parent_id=span.parent_span_id,
        service=span.service,
        name=span.name,
        kind=pb.SpanKind.Name(span.kind).removeprefix('SPAN_KIND_').lower(),
        start_ns=span.start_time.ToNanoseconds(),
        end_ns=span.end_time.ToNanoseconds(),
        is_error=span.is_error,
        attributes=dict(span.attributes),
        links=[f'{link.trace_id}:{link.span_id}' for link in span.links],
    )
