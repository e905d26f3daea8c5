"""The visible spans of a trace, and their summary."""

from dataclasses import replace

from fixtures.span_folder import HEARTBEAT, call_of, span, trace_id
from twinkle.telemetry import SpanRecord
from twinkle_services.gateway.traces.summaries import summary_of, visible_spans


def seen(spans: list[SpanRecord], tenant: str, owners: dict[str, set[str]] | None = None) -> list[SpanRecord]:
    """Return what a tenant sees; `owners` has the tenants of linked traces."""
    return visible_spans(spans, tenant, owners_of=lambda trace: (owners or {}).get(trace, set()))


def test_a_tenant_sees_its_calls_with_the_spans_around_them() -> None:
    """Spans above and below a tenant's calls are visible to this tenant only."""
    spans = call_of('alice', trace=1)
    assert seen(spans, 'alice') == spans
    assert seen(spans, 'bob') == []


def test_a_shared_trace_id_is_divided_by_the_calls() -> None:
    """Each tenant of a trace sees the spans below its own calls; spans above the calls of several belong to none."""
    root = span(1, service='client', kind='internal', name='program')
    alices = [span(2, parent=1, tenant='alice'), span(3, parent=2, kind='internal', run='ad-1')]
    bobs = [span(4, parent=1, tenant='bob'), span(5, parent=4, kind='internal', run='ad-2')]
    assert seen([root, *alices, *bobs], 'alice') == alices
    assert seen([root, *alices, *bobs], 'bob') == bobs


def test_separate_trees_of_a_trace_do_not_mix() -> None:
    """A tree of spans without a tenant, such as one whose call has not ended, is hidden."""
    unfinished = [span(7, parent=99, kind='internal', name='pass', run='ad-2')]
    alices = call_of('alice', trace=1)
    assert seen([*alices, *unfinished], 'alice') == alices


def test_a_call_without_a_tenant_belongs_to_the_call_above() -> None:
    """A call that a service makes for no tenant is visible to the tenant whose call caused it."""
    spans = [span(1, tenant='alice'), span(2, parent=1, tenant=''), span(3, tenant='')]
    assert seen(spans, 'alice') == spans[:2]


def test_parents_in_a_cycle_end() -> None:
    """Damaged parents that form a cycle do not make spans visible to other tenants, and the search ends."""
    spans = [span(1, parent=2), span(2, parent=1), span(3, parent=3, tenant='alice')]
    assert seen(spans, 'alice') == [spans[2]]


def test_a_shared_pass_reveals_nothing_of_other_tenants() -> None:
    """Links to traces that are not only the tenant's are removed, and the tokens of the pass with them."""
    call = span(1, tenant='alice')
    counts = {'twinkle.adapter_count': '3', 'twinkle.token_count': '512'}
    links = [f'{trace_id(number)}:{number:016x}' for number in (2, 3)]
    shared = span(4, parent=1, kind='internal', name='pass', attributes=counts, links=links)
    owners = {trace_id(2): {'alice'}, trace_id(3): {'bob'}}
    reduced = replace(shared, links=links[:1], attributes={'twinkle.adapter_count': '3'})
    assert seen([call, shared], 'alice', owners) == [call, reduced]
    assert seen([call, shared], 'alice', {**owners, trace_id(3): {'alice', 'bob'}}) == [call, reduced]
    assert seen([call, shared], 'alice', {**owners, trace_id(3): {'alice'}}) == [call, shared]


def test_the_tokens_of_a_pass_without_links_are_hidden_if_it_was_shared() -> None:
    """Operations that were not traced have no link, but the number of adapters counts them."""
    call = span(1, tenant='alice')
    counts = {'twinkle.adapter_count': '2', 'twinkle.token_count': '512'}
    shared = span(4, parent=1, kind='internal', name='pass', attributes=counts)
    assert seen([call, shared], 'alice')[1].attributes == {'twinkle.adapter_count': '2'}
    alone = replace(shared, attributes={**counts, 'twinkle.adapter_count': '1'})
    assert seen([call, alone], 'alice')[1] == alone


def test_a_summary_has_the_facts_of_all_spans() -> None:
    """The root gives the name; times, errors, runs, requests and verbs are those of all spans."""
    spans = call_of('alice', trace=4, at_ms=5, ms=20)
    spans[2] = replace(spans[2], is_error=True)
    summary = summary_of(trace_id(4), list(reversed(spans)))
    assert (summary.service, summary.begin_ns, summary.end_ns) == ('client', spans[0].start_ns, spans[0].end_ns)
    assert (summary.span_count, summary.is_error, summary.is_listed) == (4, True, True)
    assert (summary.run_ids, summary.request_ids, list(summary.verbs)) == ({'ad-1'}, {'rq-4'}, ['ForwardBackward'])
    assert summary.operations == {('ad-1', '4')}


def test_only_calls_that_do_work_are_listed() -> None:
    """Heartbeats, and spans that a service records without a call, are in the background."""
    assert not summary_of(trace_id(1), [span(1, name=HEARTBEAT, tenant='alice')]).is_listed
    assert not summary_of(trace_id(1), [span(1, kind='internal', name='new version')]).is_listed
