"""Incremental reading of files of spans, a bounded number of bytes at a time.

`read_new` reads what was appended since the last call, and `read_at` reads chosen lines again.
"""

import heapq
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from twinkle.telemetry import SpanRecord, parse_span

FileId = tuple[int, bytes]
"""Inode, and first bytes of a file, which contain the ids of its first span. A renamed file keeps its id."""
_SUFFIXES = ('.jsonl', '.old')
_HEAD_BYTES = 128
"""Number of bytes that identify a file. The line of a span is always longer."""
_MAX_LINE_BYTES = 64 << 10
"""Longer lines are skipped."""


@dataclass(frozen=True, kw_only=True)
class SpanFile:
    """A file with spans, as it was when the folder was scanned."""

    file_id: FileId
    path: Path
    size: int


def scan(folder: Path, *, max_files: int) -> list[SpanFile]:
    """Return at most `max_files` files of a folder, the most recently changed first; a missing folder has none."""
    found: list[tuple[int, str]] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(_SUFFIXES):
                with suppress(OSError):
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
    files = (_describe(folder / name) for _, name in heapq.nlargest(max_files, found))
    return [file for file in files if file is not None]


def _describe(path: Path) -> SpanFile | None:
    """Return a file; None if it has fewer than `_HEAD_BYTES` bytes, was removed, or is not a regular file."""
    try:
        with _opened(path) as file:
            status = os.fstat(file.fileno())
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    is_used = stat.S_ISREG(status.st_mode) and len(head) == _HEAD_BYTES
    return SpanFile(file_id=(status.st_ino, head), path=path, size=status.st_size) if is_used else None


def _opened(path: Path) -> BinaryIO:
    # Without the flags, a pipe would block, and a link could lead out of the folder.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), 'rb')


def read_new(file: SpanFile, begin: int) -> Iterator[tuple[int, int, SpanRecord | None]]:
    """Yield the begin offset, end offset and span of each complete line from `begin` on.

    A damaged line has None instead of a span. A line that is too long is read in parts of `_MAX_LINE_BYTES` and
    skipped. For each part but the last, the offset after the part is yielded as begin and as end, without a span, so
    that a caller can continue there. If `begin` is inside a line, the rest of this line is skipped. Reading ends
    early if the file cannot be read or was replaced.
    """
    with suppress(OSError), _opened(file.path) as opened:
        if (os.fstat(opened.fileno()).st_ino, opened.read(_HEAD_BYTES)) != file.file_id:
            return
        position = max(begin - 1, 0)
        opened.seek(position)
        is_inside = begin > 0
        while position < file.size:
            line = opened.readline(_MAX_LINE_BYTES)
            end = position + len(line)
            if not line.endswith(b'\n'):
                if len(line) < _MAX_LINE_BYTES:
                    return
                # The line is too long: this part and the following ones, up to its end, are skipped.
                position, is_inside = end, True
                yield position, position, None
                continue
            if not is_inside:
                yield position, end, parse_span(line)
            position, is_inside = end, False


def read_at(file: SpanFile, offsets: Iterator[int], *, max_bytes: int) -> Iterator[SpanRecord]:
    """Yield the spans of the lines at `offsets`, until the lines have more than `max_bytes` in total."""
    with suppress(OSError), _opened(file.path) as opened:
        if (os.fstat(opened.fileno()).st_ino, opened.read(_HEAD_BYTES)) != file.file_id:
            return
        for offset in offsets:
            opened.seek(offset)
            line = opened.readline(_MAX_LINE_BYTES)
            max_bytes -= len(line)
            if max_bytes < 0:
                return
            span = parse_span(line)
            if span is not None:
                yield span
