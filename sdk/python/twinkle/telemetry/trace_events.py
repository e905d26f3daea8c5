"""Conversion of spans to Chrome's trace event format, which Perfetto and `chrome://tracing` open.

`console/src/lib/traceEvents.ts` has the same conversion; both are tested with `tests/fixtures/trace_events.json`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from twinkle.telemetry.span_file import SpanRecord

SERVICES = ('client', 'gateway', 'model', 'sampler', 'data', 'checkpoint')
"""Order of the processes; other services follow by name."""


def trace_events(spans: Sequence[SpanRecord]) -> dict[str, Any]:
    """Return the content of a JSON file in the trace event format.

    A service is shown as a process. A span is on the thread of its parent; spans that overlap are on several threads. A
    call between services is an arrow from the caller's span to the callee's span. Times are microseconds since
    the first span, whose time is in `otherData`.

    Args:
        spans: spans of one or several traces, in any order.
    """
    order = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.trace_id, span.span_id))
    begin = order[0].start_ns if order else 0
    services = sorted({span.service for span in spans}, key=lambda name: (_rank(name), name))
    processes = {service: index + 1 for index, service in enumerate(services)}
    threads = _threads(order)
    places = {_key(span): (processes[span.service], thread) for span, thread in zip(order, threads, strict=True)}
    return {
        'traceEvents': [
            *(_process(name, pid) for name, pid in processes.items()),
            *(_event(span, places[_key(span)], begin) for span in order),
            *_arrows(order, places, begin),
        ],
        'displayTimeUnit': 'ms',
        'otherData': {'begin_time_ns': str(begin)},
    }


def _process(name: str, pid: int) -> dict[str, Any]:
    return {'ph': 'M', 'name': 'process_name', 'pid': pid, 'args': {'name': name}}


def _rank(service: str) -> int:
    return SERVICES.index(service) if service in SERVICES else len(SERVICES)


def _key(span: SpanRecord) -> tuple[str, str]:
    return span.trace_id, span.span_id


def _threads(order: Sequence[SpanRecord]) -> list[int]:
    """Return the number of each span's thread, from 1."""
    services = defaultdict[str, list[list[SpanRecord]]](list)
    return [_enter(services[span.service], span) for span in order]


def _enter(threads: list[list[SpanRecord]], span: SpanRecord) -> int:
    """Add a span to a thread and return the thread's number, from 1.

    The function chooses the thread whose innermost open span is the parent, otherwise the first thread without open
    spans.
    """
    for opened in threads:
        while opened and opened[-1].end_ns <= span.start_ns:
            opened.pop()
    number = next((n for n, opened in enumerate(threads) if opened and _contains(opened[-1], span)), None)
    if number is None:
        number = next((n for n, opened in enumerate(threads) if not opened), len(threads))
    if number == len(threads):
        threads.append([])
    threads[number].append(span)
    return number + 1


def _contains(parent: SpanRecord, span: SpanRecord) -> bool:
    return _key(parent) == (span.trace_id, span.parent_id) and span.end_ns <= parent.end_ns


def _event(span: SpanRecord, place: tuple[int, int], begin: int) -> dict[str, Any]:
    args: dict[str, Any] = {'trace_id': span.trace_id, 'span_id': span.span_id, **dict(sorted(span.attributes.items()))}
    if span.is_error:
        args['is_error'] = True
    if span.links:
        args['links'] = list(span.links)
    return {
        'ph': 'X',
        'name': span.name.rpartition('.')[2] if '/' in span.name else span.name,
        'cat': span.kind,
        'ts': (span.start_ns - begin) / 1000,
        'dur': (span.end_ns - span.start_ns) / 1000,
        'pid': place[0],
        'tid': place[1],
        'args': args,
    }


def _arrows(
    order: Sequence[SpanRecord], places: Mapping[tuple[str, str], tuple[int, int]], begin: int
) -> Iterator[dict[str, Any]]:
    """Yield two events for each span whose parent is in another service."""
    parents = {_key(span): span for span in order}
    for number, span in enumerate(order):
        parent = parents.get((span.trace_id, span.parent_id))
        if parent is None or parent.service == span.service:
            continue
        for phase, end in (('s', parent), ('f', span)):
            pid, tid = places[_key(end)]
            # An arrow begins inside the parent, and ends where the child begins.
            time = min(max(span.start_ns, end.start_ns), end.end_ns)
            common = {'ph': phase, 'name': 'call', 'cat': 'call', 'id': number, 'ts': (time - begin) / 1000}
            yield {**common, 'pid': pid, 'tid': tid, **({'bp': 'e'} if phase == 'f' else {})}
