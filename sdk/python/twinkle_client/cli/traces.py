"""`twinkle trace`: traces of calls across all services."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from twinkle.telemetry import SpanRecord, is_listed, read_spans, trace_events
from twinkle_client.cli.session import LocalStateDirOption, console, fail
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
        console.print(waterfall(traces[0]))
    else:
        console.print(_list(traces[:_LISTED]))


def _write_events(spans: list[SpanRecord], path: Path) -> None:
    """Write a trace in the trace event format."""
    try:
        path.write_text(json.dumps(trace_events(spans), ensure_ascii=False))
    except OSError as error:
        fail(f'--perfetto: cannot write {path}: {error.strerror}')
    text = f'wrote {len(spans)} spans to {path}; open it at https://ui.perfetto.dev'
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _traces(folder: Path, trace_id: str) -> list[list[SpanRecord]]:
    """Return traces, latest first; if `trace_id` is empty, only those that the list shows."""
    spans: dict[str, list[SpanRecord]] = defaultdict(list)
    for span in read_spans(folder, trace_id=trace_id or None):
        spans[span.trace_id].append(span)
    found = list(spans.values())
    if not trace_id:
        found = [item for item in found if any(map(is_listed, item))]
    return sorted(found, key=lambda item: _root(item).start_ns, reverse=True)


def _root(spans: list[SpanRecord]) -> SpanRecord:
    return min(spans, key=lambda span: (bool(span.parent_id), span.start_ns))


def _list(traces: list[list[SpanRecord]]) -> Table:
    table = Table('trace', 'root', 'services', 'spans', 'milliseconds')
    for spans in traces:
        root = _root(spans)
        milliseconds = (max(span.end_ns for span in spans) - root.start_ns) / 1e6
        services = ', '.join(sorted({span.service for span in spans}))
        table.add_row(root.trace_id[:12], short_name(root.name), services, str(len(spans)), f'{milliseconds:.1f}')
    return table
