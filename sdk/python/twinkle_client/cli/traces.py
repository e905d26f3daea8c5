"""`twinkle trace`: traces of calls across all services."""

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from twinkle.telemetry import SpanRecord, is_listed, read_spans, trace_events
from twinkle_client.cli.session import (
    JsonOption,
    LocalStateDirOption,
    console,
    fail,
    print_json,
    print_table,
)
from twinkle_client.cli.waterfall import short_name, waterfall
from twinkle_client.stack import default_state_dir

_LISTED = 20
"""Maximum number of traces in the list."""


def trace(
    trace_id: Annotated[str, typer.Argument(help='Prefix of a trace id. Default: list the latest traces.')] = '',
    last: Annotated[bool, typer.Option('--last', help='Show the latest trace.')] = False,
    perfetto: Annotated[
        Path | None, typer.Option(metavar='FILE', help='Write the trace to a JSON file for ui.perfetto.dev instead.')
    ] = None,
    is_json: JsonOption = False,
    state_dir: LocalStateDirOption = None,
) -> None:
    """Show the timeline of a call across all services, or list the latest traces."""
    if perfetto is not None and not (trace_id or last):
        fail('--perfetto needs a trace: give its id, or --last')
    folder = (state_dir or default_state_dir()) / 'traces'
    traces = _traces(folder, trace_id)
    if not traces:
        fail(f'no trace{f" {trace_id}" if trace_id else ""} in {folder}')
    if perfetto is not None:
        _write_events(traces[0], perfetto)
    elif trace_id or last:
        _show(traces[0], is_json=is_json)
    else:
        _list(traces[:_LISTED], is_json=is_json)


def _write_events(spans: list[SpanRecord], path: Path) -> None:
    """Write a trace in the trace event format."""
    try:
        path.write_text(json.dumps(trace_events(spans), ensure_ascii=False))
    except OSError as error:
        fail(f'--perfetto: cannot write {path}: {error.strerror}')
    text = f'wrote {len(spans)} spans to {path}; open it at https://ui.perfetto.dev'
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _traces(folder: Path, trace_id: str) -> list[list[SpanRecord]]:
    """Return traces, latest first; if `trace_id` is empty, only the traces that the list shows."""
    spans: dict[str, list[SpanRecord]] = defaultdict(list)
    for span in read_spans(folder, trace_id=trace_id or None):
        spans[span.trace_id].append(span)
    found = list(spans.values())
    if not trace_id:
        found = [item for item in found if any(map(is_listed, item))]
    return sorted(found, key=lambda item: _root(item).start_ns, reverse=True)


def _root(spans: list[SpanRecord]) -> SpanRecord:
    return min(spans, key=lambda span: (bool(span.parent_id), span.start_ns))


def _show(spans: list[SpanRecord], *, is_json: bool) -> None:
    if is_json:
        print_json([asdict(span) for span in spans])
    else:
        console.print(waterfall(spans))


def _list(traces: list[list[SpanRecord]], *, is_json: bool) -> None:
    rows = [_facts_of(spans) for spans in traces]
    if is_json:
        print_json(rows)
        return
    table = Table('trace', 'root', 'services', 'spans', 'milliseconds')
    for row in rows:
        services, count = ', '.join(row['services']), str(row['span_count'])
        table.add_row(row['trace_id'], row['root'], services, count, f'{row["milliseconds"]:.1f}')
    print_table(table)


def _facts_of(spans: list[SpanRecord]) -> dict[str, Any]:
    root = _root(spans)
    return {
        'trace_id': root.trace_id,
        'root': short_name(root.name),
        'services': sorted({span.service for span in spans}),
        'span_count': len(spans),
        'milliseconds': (max(span.end_ns for span in spans) - root.start_ns) / 1e6,
    }
