"""`twinkle trace`: traces of calls across all services."""

from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from twinkle.telemetry import SpanRecord, read_spans
from twinkle_client.cli.session import LocalStateDirOption, console, fail
from twinkle_client.cli.waterfall import short_name, waterfall
from twinkle_client.stack import default_state_dir

_LISTED = 20
"""Maximum number of traces in the list."""
_BACKGROUND = (
    'Heartbeat',
    'GetServerInfo',
    'ParkAdapter',
    'Watch',
    'Session',
    'create_session',
    'get_server_info',
    'health_check',
)
"""Parts of the names of calls that maintain or check a connection. The list omits these calls."""
_QUERIES = ('list_', 'find_operation', '/List', '/GetOperation')
"""Parts of the names of queries, such as those of `twinkle runs`. The list omits these calls too."""


def trace(
    trace_id: Annotated[str, typer.Argument(help='Prefix of a trace id. Default: list the latest traces.')] = '',
    last: Annotated[bool, typer.Option('--last', help='Show the latest trace.')] = False,
    state_dir: LocalStateDirOption = None,
) -> None:
    """Show the timeline of a call across all services, or list the latest traces."""
    folder = (state_dir or default_state_dir()) / 'traces'
    traces = _traces(folder, trace_id)
    if not traces:
        fail(f'no trace{f" {trace_id}" if trace_id else ""} in {folder}')
    if trace_id or last:
        console.print(waterfall(traces[0]))
    else:
        console.print(_list(traces[:_LISTED]))


def _traces(folder: Path, trace_id: str) -> list[list[SpanRecord]]:
    """Return traces, latest first; if `trace_id` is empty, only those that the list shows."""
    spans: dict[str, list[SpanRecord]] = defaultdict(list)
    for span in read_spans(folder, trace_id=trace_id or None):
        spans[span.trace_id].append(span)
    found = list(spans.values())
    if not trace_id:
        found = [item for item in found if _is_listed(_root(item))]
    return sorted(found, key=lambda item: _root(item).start_ns, reverse=True)


def _root(spans: list[SpanRecord]) -> SpanRecord:
    return min(spans, key=lambda span: (bool(span.parent_id), span.start_ns))


def _is_listed(root: SpanRecord) -> bool:
    # A call that a service received has a server span as its root. Another root of a service means that the service
    # started the work itself.
    is_from_service = root.kind != 'server' and root.service != 'client'
    return not is_from_service and not any(word in root.name for word in (*_BACKGROUND, *_QUERIES))


def _list(traces: list[list[SpanRecord]]) -> Table:
    table = Table('trace', 'root', 'services', 'spans', 'milliseconds')
    for spans in traces:
        root = _root(spans)
        milliseconds = (max(span.end_ns for span in spans) - root.start_ns) / 1e6
        services = ', '.join(sorted({span.service for span in spans}))
        table.add_row(root.trace_id[:12], short_name(root.name), services, str(len(spans)), f'{milliseconds:.1f}')
    return table
