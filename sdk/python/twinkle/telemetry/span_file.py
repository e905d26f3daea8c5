"""Spans in JSON Lines files, one per process, so that `twinkle trace` can show a trace without a collector.

Export to collectors uses OTLP and is configured elsewhere.
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

_MAX_FILE_BYTES = 32 << 20
"""Size at which a file is renamed with the suffix `.old`, replacing an existing file. A process uses at most two files.
"""


@dataclass(frozen=True, kw_only=True)
class SpanRecord:
    """One finished span."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    parent_id: str
    """16 hexadecimal digits; empty for a root span."""
    service: str
    name: str
    kind: str
    """'internal', 'server', 'client', 'producer' or 'consumer'."""
    start_ns: int
    """Nanoseconds since the epoch."""
    end_ns: int
    is_error: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])
    links: Sequence[str] = ()
    """Linked spans, such as those that shared a pass, as `<trace id>:<span id>`."""


class SpanFileExporter(SpanExporter):
    """Appends finished spans to a file; use it with a batching span processor.

    Args:
        path: file to append to; its folder is created if it does not exist.
        service: name of this process in the spans.
    """

    def __init__(self, path: Path, *, service: str) -> None:
        self._path = path
        self._service = service
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append `spans` with a single write, so that lines of several processes do not interleave."""
        lines = ''.join(json.dumps(asdict(self._record(span)), ensure_ascii=False) + '\n' for span in spans)
        with self._lock:
            if self._path.exists() and self._path.stat().st_size > _MAX_FILE_BYTES:
                self._path.replace(self._path.with_suffix('.old'))
            with self._path.open('a', encoding='utf-8') as file:
                file.write(lines)
        return SpanExportResult.SUCCESS

    def _record(self, span: ReadableSpan) -> SpanRecord:
        context = span.get_span_context()
        return SpanRecord(
            trace_id=f'{context.trace_id:032x}' if context else '',
            span_id=f'{context.span_id:016x}' if context else '',
            parent_id=f'{span.parent.span_id:016x}' if span.parent else '',
            service=self._service,
            name=span.name,
            kind=span.kind.name.lower(),
            start_ns=span.start_time or 0,
            end_ns=span.end_time or 0,
            is_error=not span.status.is_ok and span.status.status_code.name == 'ERROR',
            links=[f'{link.context.trace_id:032x}:{link.context.span_id:016x}' for link in span.links],
            attributes={key: str(value) for key, value in (span.attributes or {}).items()},
        )


def read_spans(folder: Path, *, trace_id: str | None = None) -> Iterator[SpanRecord]:
    """Yield the spans of every `.jsonl` and `.old` file in `folder`, in no particular order.

    Args:
        folder: folder that the exporters write to; a missing folder contains no spans.
        trace_id: prefix of the trace ids to read. None: all traces.
    """
    paths = [*folder.glob('*.jsonl'), *folder.glob('*.old')] if folder.is_dir() else []
    for path in paths:
        with path.open(encoding='utf-8') as file:
            for line in file:
                record = _parse(line)
                if record is not None and record.trace_id.startswith(trace_id or ''):
                    yield record


def _parse(line: str) -> SpanRecord | None:
    try:
        return SpanRecord(**json.loads(line))
    except (ValueError, TypeError):
        # The last line may be incomplete if the process was killed.
        return None
