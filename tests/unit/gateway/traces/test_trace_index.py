"""The index of traces follows the files of a folder, within limits."""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fixtures.span_folder import HEARTBEAT, call_of, line_of, span, trace_id, write_spans
from twinkle_services.gateway.paging import Page
from twinkle_services.gateway.traces.index import TraceIndex
from twinkle_services.gateway.traces.summaries import TraceFilter


def listed(index: TraceIndex, tenant: str | None = 'alice', **filters: Any) -> list[int]:
    """Return the numbers of the traces in the list."""
    page = index.list_page(TraceFilter(tenant_id=tenant, **filters), Page(size=1000))
    return [int(summary.trace_id, 16) for summary in page.items]


def test_a_missing_folder_has_no_traces(tmp_path: Path) -> None:
    """A missing folder counts as empty, and is read once it exists."""
    index = TraceIndex(tmp_path / 'traces')
    assert listed(index) == []
    write_spans(tmp_path / 'traces' / 'model.jsonl', call_of('alice', trace=1))
    assert listed(index) == [1]


def test_spans_of_several_files_are_one_trace(tmp_path: Path) -> None:
    """Spans that arrive later, in other files, complete a trace; its spans are ordered by time."""
    client, gateway, *model = call_of('alice', trace=1)
    index = TraceIndex(tmp_path)
    write_spans(tmp_path / 'model.jsonl', reversed(model))
    assert index.spans_of(trace_id(1), 'alice') == (model, False)
    write_spans(tmp_path / 'gateway.jsonl', [gateway])
    write_spans(tmp_path / 'client.jsonl', [client])
    assert index.spans_of(trace_id(1), 'alice') == ([client, gateway, *model], False)
    assert index.spans_of(trace_id(1), 'bob') == ([], False)
    assert index.spans_of(trace_id(2), 'alice') == ([], False)


def test_pages_have_every_trace_once(tmp_path: Path) -> None:
    """Pages list the newest traces first, even if some begin at the same time."""
    spans = [one for number in range(1, 8) for one in call_of('alice', trace=number, at_ms=number // 3)]
    write_spans(tmp_path / 'model.jsonl', spans)
    index = TraceIndex(tmp_path)
    found: list[int] = []
    cursor = None
    while True:
        page = index.list_page(TraceFilter(tenant_id='alice'), Page(size=2, after=cursor))
        found += [int(summary.trace_id, 16) for summary in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert found == [7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ('filters', 'expected'),
    [
        ({}, [3, 2, 1]),
        ({'request_id': 'rq-2'}, [2]),
        ({'run_id': 'ad-9'}, [3]),
        ({'run_id': 'ad-1', 'sequence_number': 1}, [1]),
        ({'run_id': 'ad-1', 'sequence_number': 3}, []),
        ({'min_duration': timedelta(milliseconds=20)}, [2]),
        ({'min_duration': timedelta(microseconds=20_001)}, []),
        ({'is_error': True}, []),
        ({'is_error': False}, [3, 2, 1]),
        ({'is_background_included': True}, [4, 3, 2, 1]),
    ],
)
def test_filters_select_traces(tmp_path: Path, filters: dict[str, Any], expected: list[int]) -> None:
    """Each filter selects the matching traces of the tenant."""
    spans = [
        *call_of('alice', trace=1, at_ms=1),
        *call_of('alice', trace=2, at_ms=2, ms=20),
        *call_of('alice', trace=3, at_ms=3, run='ad-9'),
        span(900, trace=4, at_ms=4, tenant='alice', name=HEARTBEAT),
        *call_of('bob', trace=5, at_ms=5),
    ]
    write_spans(tmp_path / 'model.jsonl', spans)
    assert listed(TraceIndex(tmp_path), **filters) == expected


def test_filters_see_only_the_part_of_the_tenant(tmp_path: Path) -> None:
    """Runs, errors and times of another tenant's spans in the same trace do not select the trace."""
    bobs = [
        span(8, tenant='bob', ms=50, is_error=True, request='rq-bob'),
        span(9, parent=8, kind='internal', run='ad-bob'),
    ]
    write_spans(tmp_path / 'model.jsonl', [*call_of('alice', trace=1), *bobs])
    index = TraceIndex(tmp_path)
    others: list[dict[str, Any]] = [
        {'run_id': 'ad-bob'},
        {'request_id': 'rq-bob'},
        {'is_error': True},
        {'min_duration': timedelta(milliseconds=40)},
    ]
    for filters in others:
        assert listed(index, **filters) == []
        assert listed(index, 'bob', **filters) == [1]
        assert listed(index, None, **filters) == [1]
    (summary,) = index.list_page(TraceFilter(tenant_id='alice', is_error=False), Page(size=10)).items
    assert (summary.span_count, summary.tenant_ids) == (4, {'alice'})


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    """Lines that are not spans do not hide other spans; an incomplete last line is read once it is complete."""
    good, late = span(1, tenant='alice'), span(2, trace=2, at_ms=1, tenant='alice')
    lines: list[bytes] = [line_of(good).encode()]
    for name, value in (
        ('start_ns', 'soon'), ('end_ns', -1), ('start_ns', 10**30), ('trace_id', 7), ('trace_id', '../etc/passwd'),
        ('span_id', None), ('attributes', []), ('attributes', {'a': 1}), ('links', ['x']), ('is_error', 'no'),
        ('name', '\ud800'),
    ):  # fmt: skip
        lines.append(_with(line_of(span(3, trace=3, tenant='alice')), name, value))
    lines += [b'\n', b'{"trace_id": "', b'\xff\xfe\n', b'[' * 100_000 + b'\n', b'x' * (1 << 20) + b'\n']
    last = line_of(late).encode()
    path = tmp_path / 'model.jsonl'
    path.write_bytes(b''.join(line if line.endswith(b'\n') else line + b'\n' for line in lines) + last[:100])
    index = TraceIndex(tmp_path)
    assert listed(index) == [1]
    with path.open('ab') as file:
        file.write(last[100:])
    assert listed(index) == [2, 1]
    assert index.spans_of(trace_id(2), 'alice') == ([late], False)


def _with(line: str, name: str, value: object) -> bytes:
    return json.dumps({**json.loads(line), name: value}).encode()


def test_a_renamed_file_is_not_read_twice(tmp_path: Path) -> None:
    """Spans stay in a file that a service renames; those of a deleted file disappear."""
    write_spans(tmp_path / 'model.jsonl', call_of('alice', trace=1))
    index = TraceIndex(tmp_path)
    assert listed(index) == [1]
    (tmp_path / 'model.jsonl').replace(tmp_path / 'model.old')
    write_spans(tmp_path / 'model.jsonl', call_of('alice', trace=2, at_ms=1))
    assert listed(index) == [2, 1]
    assert len(index.spans_of(trace_id(1), 'alice')[0]) == 4
    (tmp_path / 'model.jsonl').replace(tmp_path / 'model.old')
    assert listed(index) == [2]
    assert index.spans_of(trace_id(1), 'alice') == ([], False)


def test_only_the_newest_bytes_of_large_files_are_read(tmp_path: Path) -> None:
    """Each file above the limit contributes its last spans; later updates continue from there."""
    for service in ('model', 'gateway'):
        spans = [span(n, trace=n, at_ms=n, tenant='alice', service=service) for n in range(1, 2001)]
        write_spans(tmp_path / f'{service}.jsonl', spans)
    index = TraceIndex(tmp_path, read_bytes=200_000)
    first = listed(index)
    assert first == list(range(2000, 2000 - len(first), -1))
    assert 100 < len(first) < 1000
    assert len(index.spans_of(trace_id(2000), 'alice')[0]) == 2
    write_spans(tmp_path / 'model.jsonl', [span(3000, trace=3000, at_ms=3000, tenant='alice')])
    assert listed(index) == [3000, *first]


def test_old_traces_leave_the_index(tmp_path: Path) -> None:
    """Above the limit, background calls are removed from the index first, and then the oldest traces."""
    calls = [span(n, trace=n, at_ms=n, tenant='alice') for n in range(1, 11)]
    beats = [span(n, trace=n, at_ms=n, tenant='alice', name=HEARTBEAT) for n in range(11, 21)]
    write_spans(tmp_path / 'gateway.jsonl', [*calls, *beats])
    index = TraceIndex(tmp_path, max_traces=10)
    assert listed(index, is_background_included=True) == list(range(10, 1, -1))


def test_the_spans_of_a_long_trace_are_bounded(tmp_path: Path) -> None:
    """A trace with very many spans is returned partially, and the response says so."""
    root = span(1, tenant='alice')
    children = [span(n, parent=1, kind='internal', name='queue') for n in range(2, 6002)]
    write_spans(tmp_path / 'model.jsonl', [root, *children])
    spans, is_truncated = TraceIndex(tmp_path).spans_of(trace_id(1), 'alice')
    assert len(spans) == 5000
    assert is_truncated


def test_other_files_are_ignored(tmp_path: Path) -> None:
    """Links, pipes, folders and empty files in the folder do not block the list or cause an error."""
    outside = tmp_path / 'outside' / 'model.jsonl'
    write_spans(outside, call_of('alice', trace=9))
    folder = tmp_path / 'traces'
    write_spans(folder / 'model.jsonl', call_of('alice', trace=1))
    (folder / 'link.jsonl').symlink_to(outside)
    os.mkfifo(folder / 'pipe.jsonl')
    (folder / 'folder.jsonl').mkdir()
    (folder / 'empty.old').touch()
    (folder / 'notes.txt').write_text(line_of(span(5, trace=5, tenant='alice')))
    assert listed(TraceIndex(folder)) == [1]
