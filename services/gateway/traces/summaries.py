"""Summaries of traces, filters for lists of them, and the parts of a trace that a tenant may see."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from twinkle.telemetry import SpanRecord, is_listed
from twinkle_services.gateway.paging import Cursor

MAX_LISTED_NAMES = 16
"""Maximum number of runs, request ids, verbs and tenants in a summary."""
_MAX_NAMES = 256
"""Maximum number of different values by which a trace is found; further ones are ignored."""
_EPOCH = datetime.fromtimestamp(0, UTC)
_TENANT, _ADAPTER, _NUMBER = 'twinkle.tenant_id', 'twinkle.adapter_id', 'twinkle.sequence_number'
_REQUEST, _VERB = 'twinkle.request_id', 'twinkle.verb'
_PASS_TOKENS, _PASS_ADAPTERS = 'twinkle.token_count', 'twinkle.adapter_count'


@dataclass(frozen=True, kw_only=True)
class TraceFilter:
    """Filter for traces; a trace is listed if it matches all conditions."""

    tenant_id: str | None
    """Tenant that sees the list; None selects all spans of all tenants."""
    request_id: str = ''
    run_id: str = ''
    sequence_number: int = 0
    """Number of an operation of the run; 0 for all."""
    min_duration: timedelta = timedelta()
    is_error: bool | None = None
    is_background_included: bool = False

    def for_whole_traces(self) -> 'TraceFilter':
        """Return a filter that accepts every trace if the part that the tenant sees may match."""
        return replace(self, is_error=self.is_error or None)

    def accepts(self, trace: 'TraceSummary') -> bool:
        """Return whether a trace, or the part of it that the tenant sees, matches."""
        number = self.sequence_number
        return (
            (trace.is_listed or self.is_background_included)
            and (self.is_error is None or trace.is_error == self.is_error)
            and trace.end_ns - trace.begin_ns >= self.min_duration // timedelta(microseconds=1) * 1000
            and (not self.request_id or self.request_id in trace.request_ids)
            and (not self.run_id or self.run_id in trace.run_ids)
            and (not number or (self.run_id, str(number)) in trace.operations)
        )


@dataclass(slots=True, kw_only=True)
class TraceSummary:
    """Facts of the spans of a trace that were added so far. Spans may be added in any order."""

    trace_id: str
    name: str = ''
    """Name of the first span: the earliest one without a parent, or else the earliest one."""
    service: str = ''
    begin_ns: int = 0
    end_ns: int = 0
    span_count: int = 0
    is_error: bool = False
    is_listed: bool = False
    """Whether the trace has a call that does more than read data, or maintain or check a connection."""
    services: set[str] = field(default_factory=set[str])
    tenant_ids: set[str] = field(default_factory=set[str])
    run_ids: set[str] = field(default_factory=set[str])
    request_ids: set[str] = field(default_factory=set[str])
    operations: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Run and number of each operation."""
    verbs: dict[str, None] = field(default_factory=dict[str, None])
    _root_order: tuple[bool, int] = (True, 1 << 64)

    def add(self, span: SpanRecord) -> None:
        """Add the facts of a span."""
        self.begin_ns = min(self.begin_ns, span.start_ns) if self.span_count else span.start_ns
        self.end_ns = max(self.end_ns, span.end_ns)
        self.span_count += 1
        self.is_error |= span.is_error
        self.is_listed = self.is_listed or is_listed(span)
        order = (bool(span.parent_id), span.start_ns)
        if order < self._root_order:
            self._root_order, self.name, self.service = order, span.name, span.service
        given = span.attributes
        for names, value in (
            (self.services, span.service),
            (self.tenant_ids, given.get(_TENANT)),
            (self.run_ids, given.get(_ADAPTER)),
            (self.request_ids, given.get(_REQUEST)),
        ):
            if value and len(names) < _MAX_NAMES:
                names.add(value)
        if _NUMBER in given and _ADAPTER in given and len(self.operations) < _MAX_NAMES:
            self.operations.add((given[_ADAPTER], given[_NUMBER]))
        if _VERB in given and len(self.verbs) < MAX_LISTED_NAMES:
            self.verbs[given[_VERB]] = None

    @property
    def sort_key(self) -> tuple[int, str]:
        """Position in a list: microseconds of the beginning, then id."""
        return self.begin_ns // 1000, self.trace_id

    @property
    def cursor(self) -> Cursor:
        """Position in a list, for page tokens."""
        return Cursor(_EPOCH + timedelta(microseconds=self.begin_ns // 1000), self.trace_id)


def sort_key_of(cursor: Cursor) -> tuple[int, str]:
    """Return the sort key of the trace at a cursor."""
    return (cursor.create_time - _EPOCH) // timedelta(microseconds=1), cursor.item_id


def summary_of(trace_id: str, spans: Sequence[SpanRecord]) -> TraceSummary:
    """Return the summary of spans of one trace."""
    summary = TraceSummary(trace_id=trace_id)
    for span in spans:
        summary.add(span)
    return summary


def visible_spans(
    spans: Sequence[SpanRecord], tenant_id: str, *, owners_of: Callable[[str], set[str]]
) -> list[SpanRecord]:
    """Return the spans of a trace that a tenant may see, without data about other tenants.

    Callers choose the ids of traces, so one trace may have spans of several tenants. A span belongs to the tenant that
    it names, or else to the tenant of the nearest span above it that names one. All other spans, such as those of a
    program, belong to the only tenant that is named below their root, if there is exactly one. `tenant_id` is not
    empty; `owners_of` returns the tenants of a trace by its id.
    """
    owners = _owners(spans)
    visible = [span for span in spans if owners.get(span.span_id) == tenant_id]
    return [_without_others(span, {id_ for id_ in _linked(span) if owners_of(id_) == {tenant_id}}) for span in visible]


def _linked(span: SpanRecord) -> set[str]:
    return {link.partition(':')[0] for link in span.links}


def _owners(spans: Sequence[SpanRecord]) -> dict[str, str]:
    """Return the tenants of spans by the spans' ids. Spans that belong to no single tenant are absent."""
    by_id = {span.span_id: span for span in spans}
    tenants: dict[str, str] = {}
    roots: dict[str, str] = {}
    for span in spans:
        # Spans from this one up to the first one whose tenant and root are known.
        path: dict[str, None] = {}
        current: SpanRecord | None = span
        while current is not None and current.span_id not in roots and current.span_id not in path:
            path[current.span_id] = None
            current = by_id.get(current.parent_id)
        top = current.span_id if current is not None else next(reversed(path), '')
        root, tenant = roots.get(top, top), tenants.get(top, '')
        for span_id in reversed(path):
            tenant = by_id[span_id].attributes.get(_TENANT) or tenant
            roots[span_id], tenants[span_id] = root, tenant
    below = defaultdict[str, set[str]](set)
    for span_id, tenant in tenants.items():
        below[roots[span_id]].update({tenant} - {''})
    sole = {root: next(iter(found)) for root, found in below.items() if len(found) == 1}
    owners = {span_id: tenant or sole.get(roots[span_id], '') for span_id, tenant in tenants.items()}
    return {span_id: tenant for span_id, tenant in owners.items() if tenant}


def _without_others(span: SpanRecord, own_traces: set[str]) -> SpanRecord:
    """Return a span without links to other tenants' traces, and without the token count of a pass that they share.

    The number of adapters of a pass is in the receipts of its operations, so it stays.
    """
    links = [link for link in span.links if link.partition(':')[0] in own_traces]
    adapter_count = span.attributes.get(_PASS_ADAPTERS, '1')
    if adapter_count in {'1', str(len(links) + 1)}:
        return span if len(links) == len(span.links) else replace(span, links=links)
    attributes: Mapping[str, str] = {name: value for name, value in span.attributes.items() if name != _PASS_TOKENS}
    return replace(span, links=links, attributes=attributes)
