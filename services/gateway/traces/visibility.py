"""The parts of a trace that a tenant may see."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from twinkle.telemetry import SpanRecord

_TENANT, _PASS_TOKENS, _PASS_ADAPTERS = 'twinkle.tenant_id', 'twinkle.token_count', 'twinkle.adapter_count'


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
    """Return a span without links to other tenants' traces, and without the token count of a pass shared with them.

    The number of adapters of a pass is in the receipts of its operations, so it stays.
    """
    links = [link for link in span.links if link.partition(':')[0] in own_traces]
    adapter_count = span.attributes.get(_PASS_ADAPTERS, '1')
    if adapter_count in {'1', str(len(links) + 1)}:
        return span if len(links) == len(span.links) else replace(span, links=links)
    attributes: Mapping[str, str] = {name: value for name, value in span.attributes.items() if name != _PASS_TOKENS}
    return replace(span, links=links, attributes=attributes)
