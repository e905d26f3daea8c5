"""Rendering of a trace as a tree of bars on a time axis."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from twinkle.telemetry import SpanRecord

_WIDTH = 20
_COLOURS = {
    'client': 'cyan',
    'gateway': 'magenta',
    'model': 'green',
    'sampler': 'yellow',
    'checkpoint': 'blue',
    'data': 'white',
}


def waterfall(spans: Sequence[SpanRecord]) -> Table:
    """Return a table with one row per span, children below their parents.

    Args:
        spans: Spans of one trace, at least one, in any order. A span whose parent is missing becomes a root.
    """
    begin = min(span.start_ns for span in spans)
    end = max(span.end_ns for span in spans)
    table = Table(title=f'trace {spans[0].trace_id}, {(end - begin) / 1e6:.1f} ms', show_edge=False, pad_edge=False)
    table.add_column('service', no_wrap=True, min_width=10)
    table.add_column('span', no_wrap=True)
    table.add_column('ms', justify='right', no_wrap=True, min_width=6)
    table.add_column('time', no_wrap=True)
    for depth, span in _ordered(spans):
        colour = 'red' if span.is_error else _COLOURS.get(span.service, 'white')
        table.add_row(
            Text(span.service, style=colour),
            Text('  ' * depth + _label(span), style='red' if span.is_error else ''),
            f'{(span.end_ns - span.start_ns) / 1e6:.1f}',
            Text(_bar(span, begin, end), style=colour),
        )
    return table


def _ordered(spans: Sequence[SpanRecord]) -> Iterator[tuple[int, SpanRecord]]:
    """Yield spans with their depth. Each span precedes its children, and siblings are sorted by start time."""
    known = {span.span_id for span in spans}
    children: dict[str, list[SpanRecord]] = defaultdict(list)
    for span in sorted(spans, key=lambda item: item.start_ns):
        children[span.parent_id if span.parent_id in known else ''].append(span)
    pending = [(0, span) for span in reversed(children[''])]
    while pending:
        depth, span = pending.pop()
        yield depth, span
        pending += [(depth + 1, child) for child in reversed(children[span.span_id])]


def short_name(name: str) -> str:
    """Return 'Training/Execute' for 'twinkle.api.model.v1.TrainingService/Execute'; keep other names."""
    service, _, method = name.removeprefix('/').rpartition('/')
    return f'{service.rpartition(".")[2].removesuffix("Service")}/{method}' if service else method


def _label(span: SpanRecord) -> str:
    """Return a span's name, with an arrow for a call to another process."""
    return f'{short_name(span.name)} →' if span.kind == 'client' else short_name(span.name)


def _bar(span: SpanRecord, begin: int, end: int) -> str:
    scale = _WIDTH / max(end - begin, 1)
    left = min(int((span.start_ns - begin) * scale), _WIDTH - 1)
    width = max(round((span.end_ns - span.start_ns) * scale), 1)
    return ' ' * left + '█' * min(width, _WIDTH - left)
