"""Spans in JSON Lines files, one per service, so that `twinkle trace` can show a trace without a collector.

Export to collectors uses OTLP and is configured elsewhere.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

_MAX_FILE_BYTES = 32 << 20
_MAX_NS = 253_402_300_800 * 10**9
"""End of the year 9999."""
_HEXADECIMAL = re.compile('[0-9a-f]+')
_LINK = re.compile('[0-9a-f]{32}:[0-9a-f]{16}')


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
    """Linked spans, such as spans that shared a pass, as `<trace id>:<span id>`."""


class SpanFileExporter(SpanExporter):
    """Appends finished spans to a file; use it with a batching span processor.

    Several processes may append to one file.

    Args:
        path: file to append to; its folder is created if it does not exist.
        service: name of this process in the spans.
        max_bytes: size at which the file is renamed with the suffix `.old`, replacing an existing file.
    """

    def __init__(self, path: Path, *, service: str, max_bytes: int = _MAX_FILE_BYTES) -> None:
        self._path = path
        self._service = service
        self._max_bytes = max_bytes
        path.parent.mkdir(parents=True, exist_ok=True)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append `spans` with a single write, so that lines of several processes do not interleave."""
        lines = ''.join(json.dumps(asdict(self._record(span)), ensure_ascii=False) + '\n' for span in spans)
        with self._locked() as file:
            file.write(lines.encode())
        return SpanExportResult.SUCCESS

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """Open and lock the file, after renaming it if it is too large."""
        while True:
            with self._path.open('ab') as file:
                # Without a lock, two processes could rename the file in turn, and the first file would be lost.
                fcntl.flock(file, fcntl.LOCK_EX)
                status = os.fstat(file.fileno())
                if not self._is_current(status):
                    continue
                if status.st_size <= self._max_bytes:
                    yield file
                    return
                self._path.replace(self._path.with_suffix('.old'))

    def _is_current(self, status: os.stat_result) -> bool:
        """Return whether the opened file has not been renamed or deleted."""
        try:
            return os.path.samestat(status, self._path.stat())
        except FileNotFoundError:
            return False

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
        with path.open('rb') as file:
            for line in file:
                record = parse_span(line)
                if record is not None and record.trace_id.startswith(trace_id or ''):
                    yield record


def parse_span(line: bytes) -> SpanRecord | None:
    """Return the span of a line; None if the line is damaged, such as the last line of a killed process."""
    try:
        record = SpanRecord(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
    if not _is_valid(record) or (b'\\u' in line and not _is_encodable(record)):
        return None
    # The clock of the machine may have been set back during the span.
    return record if record.start_ns <= record.end_ns else replace(record, end_ns=record.start_ns)


def _is_valid(record: SpanRecord) -> bool:
    """Return whether all fields of a parsed record have the declared types and ranges."""
    if not isinstance(record.attributes, dict) or not isinstance(record.links, list):
        return False
    texts: list[object] = [record.service, record.name, record.kind, *record.attributes, *record.attributes.values()]
    links: list[object] = [*record.links]
    return (
        is_span_id(record.trace_id, digits=32)
        and is_span_id(record.span_id, digits=16)
        and (record.parent_id == '' or is_span_id(record.parent_id, digits=16))
        and all(isinstance(link, str) and _LINK.fullmatch(link) for link in links)
        and all(isinstance(text, str) for text in texts)
        and type(record.is_error) is bool
        and all(type(time) is int and 0 <= time < _MAX_NS for time in (record.start_ns, record.end_ns))
    )


def is_span_id(value: object, *, digits: int) -> bool:
    """Return whether `value` is the id of a span (16 digits) or of a trace (32 digits)."""
    return isinstance(value, str) and len(value) == digits and _HEXADECIMAL.fullmatch(value) is not None


def _is_encodable(record: SpanRecord) -> bool:
    """Return whether all strings can be encoded: JSON can escape surrogates, which UTF-8 cannot represent."""
    texts = (record.service, record.name, record.kind, *record.attributes, *record.attributes.values())
    return not any('\ud800' <= character <= '\udfff' for text in texts for character in text)
