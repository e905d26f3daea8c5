"""The conversion of spans to trace events. The console has the same conversion, tested with the same file."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

from fixtures.span_folder import span
from twinkle.telemetry import SpanRecord, trace_events

EXAMPLE = json.loads((Path(__file__).parents[2] / 'fixtures' / 'trace_events.json').read_text())
TIMES = ('start_ns', 'end_ns')
"""Fields that are strings in the file, because JavaScript numbers cannot represent them exactly."""


def example_spans() -> list[SpanRecord]:
    """Return the spans of the example."""
    exact: list[dict[str, Any]] = [{**line, **{name: int(line[name]) for name in TIMES}} for line in EXAMPLE['spans']]
    return [SpanRecord(**fields) for fields in exact]


def test_an_example_has_the_expected_events() -> None:
    """Operations that share a pass, a span without its parent, and a failed span give the expected events."""
    assert json.loads(json.dumps(trace_events(example_spans()))) == EXAMPLE['events']


def test_the_order_of_the_spans_does_not_matter() -> None:
    """Spans may be given in any order."""
    spans = example_spans()
    random.Random(1).shuffle(spans)
    assert json.loads(json.dumps(trace_events(spans))) == EXAMPLE['events']


def test_no_spans_have_no_events() -> None:
    """An empty list of spans gives a valid file without events."""
    assert trace_events([])['traceEvents'] == []


def test_spans_of_a_thread_are_nested_or_separate() -> None:
    """Spans on one thread never partially overlap, because the format cannot represent this."""
    draw = random.Random(7)
    spans = [
        span(n, parent=draw.randrange(n), at_ms=draw.randrange(100), ms=draw.randrange(40), service=draw.choice('ab'))
        for n in range(1, 300)
    ]
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in trace_events(spans)['traceEvents']:
        if event['ph'] == 'X':
            threads.setdefault((event['pid'], event['tid']), []).append(event)
    for events in threads.values():
        open_ends: list[float] = []
        for event in events:
            while open_ends and open_ends[-1] <= event['ts']:
                open_ends.pop()
            open_ends.append(event['ts'] + event['dur'])
            assert all(outer >= inner for outer, inner in pairwise(open_ends))
