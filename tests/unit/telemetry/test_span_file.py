"""Files of spans: several exporters may append to one file, which is renamed once it is too large."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from twinkle.telemetry import read_spans
from twinkle.telemetry.span_file import SpanFileExporter

MAX_BYTES = 4096
WRITERS, SPANS = 4, 250


def _span(number: int) -> ReadableSpan:
    with TracerProvider().get_tracer('tests').start_as_current_span(f'span {number}') as span:
        pass
    assert isinstance(span, ReadableSpan)
    return span


def test_a_full_file_is_renamed_once(tmp_path: Path) -> None:
    """The renamed file is always full, although several exporters find the file full at the same time."""
    span = _span(0)

    def export() -> list[int]:
        exporter = SpanFileExporter(tmp_path / 'a.jsonl', service='a', max_bytes=MAX_BYTES)
        sizes: list[int] = []
        for _ in range(SPANS):
            exporter.export([span])
            old = tmp_path / 'a.old'
            sizes.append(old.stat().st_size if old.exists() else MAX_BYTES + 1)
        return sizes

    with ThreadPoolExecutor(WRITERS) as threads:
        runs = list(threads.map(lambda _: export(), range(WRITERS)))
    assert all(size > MAX_BYTES for sizes in runs for size in sizes)
    assert MAX_BYTES < sum(path.stat().st_size for path in tmp_path.iterdir()) < 3 * MAX_BYTES


def test_spans_are_read_from_both_files(tmp_path: Path) -> None:
    """A reader finds each span of the file and of the renamed file once."""
    exporter = SpanFileExporter(tmp_path / 'a.jsonl', service='a', max_bytes=MAX_BYTES)
    for number in range(30):
        exporter.export([_span(number)])
    assert (tmp_path / 'a.old').exists()
    assert sorted(span.name for span in read_spans(tmp_path)) == sorted(f'span {number}' for number in range(30))
