"""Index of the spans in a folder: a summary of each trace, and the places of its spans in the files."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from twinkle.telemetry import SpanRecord
from twinkle_services.gateway.paging import Listing, Page, list_page
from twinkle_services.gateway.traces.files import FileId, SpanFile, read_at, read_new, scan
from twinkle_services.gateway.traces.summaries import TraceFilter, TraceSummary, sort_key_of, summary_of, visible_spans

_READ_BYTES = 32 << 20
"""Maximum number of bytes that an update reads from all files together; older spans are ignored."""
_MAX_FILES = 64
_MAX_TRACES = 20_000
_MAX_SPANS = 5000
"""Maximum number of spans of a trace that are returned."""
_MAX_TRACE_BYTES = 3 << 20
"""Maximum size of the lines of a returned trace; clients accept messages of 4 MiB by default."""
_MAX_READS = 2000
"""Maximum number of traces whose spans one list reads. The results are kept, so the next list continues there."""


@dataclass(slots=True)
class _Entry:
    """A trace in the index."""

    summary: TraceSummary
    places: dict[FileId, 'array[int]'] = field(default_factory=dict['FileId', 'array[int]'])
    """Offsets of lines by file."""
    parts: dict[str, TraceSummary] = field(default_factory=dict[str, TraceSummary])
    """Summary of the spans that each tenant may see, by tenant; cleared when spans are added."""

    def span_places(self) -> int:
        return sum(map(len, self.places.values()))


class TraceIndex:
    """Finds traces in a folder. All methods block.

    Memory and time are bounded: an update reads the last bytes of the files that changed last, and only the newest
    traces stay in the index.

    Concurrency: calls must not overlap.
    """

    def __init__(self, folder: Path, *, read_bytes: int = _READ_BYTES, max_traces: int = _MAX_TRACES) -> None:
        """Create an empty index of `folder`; see the constants of this module for the limits."""
        self._folder = folder
        self._read_bytes = read_bytes
        self._max_traces = max_traces
        self._files: dict[FileId, SpanFile] = {}
        self._offsets: dict[FileId, int] = {}
        """Offset of the first unread byte of each file."""
        self._traces: dict[str, _Entry] = {}

    def list_page(self, wanted: TraceFilter, page: Page) -> Listing[TraceSummary]:
        """Return a page of the traces that match a filter, newest first."""
        self._update()
        after = None if page.after is None else sort_key_of(page.after)
        found: list[tuple[TraceSummary, TraceSummary]] = []
        for whole, seen in self._seen_by(wanted, after):
            found.append((whole, seen))
            if len(found) > page.size:
                break
        listing = list_page(found, page, cursor_of=lambda pair: pair[0].cursor)
        return Listing(items=[seen for _, seen in listing.items], next_cursor=listing.next_cursor)

    def spans_of(self, trace_id: str, tenant_id: str | None) -> tuple[list[SpanRecord], bool]:
        """Return the spans of a trace that a tenant may see, and whether the trace has more spans than were read.

        A `tenant_id` of None selects all spans. The spans have the order that the contract defines.
        """
        self._update()
        entry = self._traces.get(trace_id)
        if entry is None:
            return [], False
        spans = self._read(entry)
        is_truncated = len(spans) < entry.summary.span_count
        if tenant_id is not None:
            spans = self._visible(spans, tenant_id)
        return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.span_id)), is_truncated

    def _seen_by(
        self, wanted: TraceFilter, after: tuple[int, str] | None
    ) -> Iterator[tuple[TraceSummary, TraceSummary]]:
        """Yield two summaries of each matching trace after a position: of all spans, and of those the tenant sees."""
        reads, whole_filter = 0, wanted.for_whole_traces()
        for entry in sorted(self._traces.values(), key=lambda entry: entry.summary.sort_key, reverse=True):
            whole = entry.summary
            if (after is not None and whole.sort_key >= after) or not whole_filter.accepts(whole):
                continue
            if wanted.tenant_id is None:
                yield whole, whole
            elif wanted.tenant_id in whole.tenant_ids:
                reads += wanted.tenant_id not in entry.parts
                if reads > _MAX_READS:
                    return
                part = self._part(entry, wanted.tenant_id)
                if wanted.accepts(part):
                    yield whole, part

    def _part(self, entry: _Entry, tenant_id: str) -> TraceSummary:
        if tenant_id not in entry.parts:
            visible = self._visible(self._read(entry), tenant_id)
            entry.parts[tenant_id] = summary_of(entry.summary.trace_id, visible)
        return entry.parts[tenant_id]

    def _visible(self, spans: Sequence[SpanRecord], tenant_id: str) -> list[SpanRecord]:
        return visible_spans(spans, tenant_id, owners_of=self._owners_of)

    def _owners_of(self, trace_id: str) -> set[str]:
        entry = self._traces.get(trace_id)
        return entry.summary.tenant_ids if entry else set()

    def _read(self, entry: _Entry) -> list[SpanRecord]:
        spans: list[SpanRecord] = []
        share = _MAX_TRACE_BYTES // max(len(entry.places), 1)
        for file_id, offsets in entry.places.items():
            spans += read_at(self._files[file_id], iter(offsets), max_bytes=share)
        return spans

    def _update(self) -> None:
        """Read the lines that were appended since the last update."""
        files = {file.file_id: file for file in scan(self._folder, max_files=_MAX_FILES)}
        self._forget(self._files.keys() - files.keys())
        self._files = files
        share = self._read_bytes // max(len(files), 1)
        for file_id, file in files.items():
            begin = max(self._offsets.get(file_id, 0), file.size - share)
            for offset, end, span in read_new(file, begin):
                self._offsets[file_id] = end
                if span is not None:
                    self._add(span, file_id, offset)
            self._drop_oldest()

    def _add(self, span: SpanRecord, file_id: FileId, offset: int) -> None:
        entry = self._traces.get(span.trace_id)
        if entry is None:
            entry = self._traces[span.trace_id] = _Entry(TraceSummary(trace_id=span.trace_id))
        entry.summary.add(span)
        entry.parts.clear()
        if entry.span_places() < _MAX_SPANS:
            entry.places.setdefault(file_id, array('q')).append(offset)

    def _forget(self, file_ids: set[FileId]) -> None:
        """Remove the spans of deleted files; a trace stays while another file has spans of it."""
        for file_id in file_ids:
            self._offsets.pop(file_id, None)
            for trace_id, entry in list(self._traces.items()):
                if entry.places.pop(file_id, None) is not None and not entry.places:
                    del self._traces[trace_id]

    def _drop_oldest(self) -> None:
        """Remove traces above the limit: first those that lists omit by default, then the oldest ones."""
        if len(self._traces) <= self._max_traces:
            return
        order = sorted(self._traces.values(), key=lambda entry: (entry.summary.is_listed, entry.summary.sort_key))
        # More traces than necessary are removed, so that the next new traces do not cause another sort.
        for entry in order[: len(order) - self._max_traces * 9 // 10]:
            del self._traces[entry.summary.trace_id]
