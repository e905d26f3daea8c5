"""The trace of each operation has a span for its pass, with links to the operations that shared the pass."""

import asyncio
from pathlib import Path

from opentelemetry import trace

from fixtures.dispatching import Harness
from fixtures.model_verbs import let_others_run, training
from twinkle.telemetry import SpanRecord, read_spans
from twinkle_client.tracing import tracing_to
from twinkle_services.kit.telemetry import spans
from twinkle_services.kit.telemetry.spans import MAX_LINKS
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.operation import Step
from twinkle_services.model.domain.scheduler import Scheduler

_tracer = trace.get_tracer('test')


async def _traced(harness: Harness, adapter: Adapter) -> None:
    with _tracer.start_as_current_span(adapter.adapter_id):
        await harness.start(adapter, training())


async def _share_a_pass(folder: Path, count: int) -> None:
    """Train `count` adapters in one pass, which forms while another operation occupies the engine; write the spans."""
    harness = Harness(Scheduler(batch_tokens=8 * count))
    adapters = await harness.adapters(count + 1)
    harness.trainer.gate.clear()
    with tracing_to(folder):
        first = harness.start(adapters[0], training())
        await let_others_run()
        shared = [asyncio.ensure_future(_traced(harness, adapter)) for adapter in adapters[1:]]
        await let_others_run()
        harness.trainer.gate.set()
        await asyncio.gather(first, *shared)


def _by_trace(folder: Path, name: str) -> dict[str, SpanRecord]:
    return {span.trace_id: span for span in read_spans(folder) if span.name == name}


async def test_operations_of_a_pass_are_linked(tmp_path: Path) -> None:
    """A pass of four operations adds a span to four traces, each with links to the other three operations."""
    await _share_a_pass(tmp_path, 4)
    roots = {span.span_id: f'{span.trace_id}:{span.span_id}' for span in read_spans(tmp_path) if not span.parent_id}
    passes = _by_trace(tmp_path, 'pass')
    assert len(passes) == len(roots) == 4
    for span in passes.values():
        assert set(span.links) == set(roots.values()) - {roots[span.parent_id]}
        assert (span.attributes['twinkle.adapter_count'], span.attributes['twinkle.token_count']) == ('4', '32')
    assert _by_trace(tmp_path, 'queue').keys() == passes.keys()


async def test_task_of_a_separate_trace_has_no_parent(tmp_path: Path) -> None:
    """A task that outlives a call has no current span, and its caller keeps its own span."""

    async def current() -> trace.SpanContext | None:
        return spans.current()

    with tracing_to(tmp_path), _tracer.start_as_current_span('call') as call:
        assert await asyncio.create_task(current(), context=spans.separate_trace()) is None
        assert await asyncio.create_task(current()) == spans.current() == call.get_span_context()


async def test_links_are_limited(tmp_path: Path) -> None:
    """A pass that many operations share has a limited number of links in each trace."""
    await _share_a_pass(tmp_path, MAX_LINKS + 2)
    counts = {len(span.links) for span in read_spans(tmp_path) if span.name == 'pass'}
    assert counts == {MAX_LINKS}


async def test_operations_outside_a_trace_record_nothing(tmp_path: Path) -> None:
    """An operation without a recorded span adds no spans; a quick verb has a span of the engine."""
    harness = Harness()
    (adapter,) = await harness.adapters(1)
    with tracing_to(tmp_path):
        await harness.start(adapter, training())
        with _tracer.start_as_current_span('traced'):
            await harness.start(adapter, Step())
    assert sorted(span.name for span in read_spans(tmp_path)) == ['engine', 'queue', 'traced']
