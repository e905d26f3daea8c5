"""Operations on traces."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from twinkle.telemetry import SpanRecord
from twinkle_services.gateway.errors import TraceNotFound, TracesNotStored
from twinkle_services.gateway.paging import Listing, Page
from twinkle_services.gateway.traces.index import TraceIndex
from twinkle_services.gateway.traces.summaries import TraceFilter, TraceSummary, summary_of
from twinkle_services.kit.caller import Caller, require_scope
from twinkle_services.kit.worker import completed

_Result = TypeVar('_Result')


@dataclass(frozen=True, kw_only=True)
class VisibleTrace:
    """The part of a trace that a caller sees."""

    summary: TraceSummary
    spans: Sequence[SpanRecord]
    """Sorted by their beginning."""
    is_truncated: bool
    """Whether the trace has more spans than were read."""


class Traces:
    """Lists and reads the traces of a caller's tenant, or of all tenants for operators."""

    def __init__(self, index: TraceIndex | None) -> None:
        """Create traces of an index; None if this gateway has no folder of traces."""
        self._index = index
        self._turn = asyncio.Lock()

    async def list(self, caller: Caller, page: Page, wanted: TraceFilter) -> Listing[TraceSummary]:
        """Return a page of traces, newest first; `wanted` has the caller's tenant, or no tenant.

        Raises:
            TracesNotStored: this gateway has no folder of traces.
            ScopeMissing: the list includes all tenants, and the caller is not an operator.
        """
        index = self._readable(caller, wanted.tenant_id)
        return await self._run(lambda: index.list_page(wanted, page))

    async def get(self, caller: Caller, trace_id: str, tenant_id: str | None) -> VisibleTrace:
        """Return the spans of a trace that belong to a tenant; a `tenant_id` of None selects all tenants.

        Raises:
            TracesNotStored: this gateway has no folder of traces.
            ScopeMissing: the call includes all tenants, and the caller is not an operator.
            TraceNotFound: no stored span of the trace is visible to the caller.
        """
        index = self._readable(caller, tenant_id)
        spans, is_truncated = await self._run(lambda: index.spans_of(trace_id, tenant_id))
        if not spans:
            raise TraceNotFound(trace_id)
        return VisibleTrace(summary=summary_of(trace_id, spans), spans=spans, is_truncated=is_truncated)

    def _readable(self, caller: Caller, tenant_id: str | None) -> TraceIndex:
        if tenant_id is None:
            require_scope(caller, 'operator')
        if self._index is None:
            raise TracesNotStored('TraceService')
        return self._index

    async def _run(self, function: Callable[[], _Result]) -> _Result:
        """Run a function of the index in a thread, one call at a time, even if a caller is cancelled."""
        async with self._turn:
            return await completed(asyncio.to_thread(function))
