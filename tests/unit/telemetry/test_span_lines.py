"""Lines of span files: valid lines become spans, and other lines are skipped."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fixtures.span_folder import line_of, span, write_spans
from twinkle.telemetry import parse_span, read_spans


def test_a_written_span_is_read() -> None:
    """A line keeps all fields of a span."""
    written = span(1, parent=2, tenant='alice', is_error=True, links=['a' * 32 + ':' + 'b' * 16])
    assert parse_span(line_of(written).encode()) == written


def test_a_clock_that_was_set_back_gives_an_empty_span() -> None:
    """A span that ends before its beginning has no duration."""
    written = span(1)
    read = parse_span(line_of(replace(written, end_ns=written.start_ns - 5)).encode())
    assert read == replace(written, end_ns=written.start_ns)


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('trace_id', 'A' * 32),
        ('trace_id', 5),
        ('span_id', 'a' * 15),
        ('parent_id', 'root'),
        ('service', None),
        ('name', 'bad \ud800'),
        ('kind', 3),
        ('start_ns', 1.5),
        ('start_ns', True),
        ('end_ns', -1),
        ('end_ns', 10**30),
        ('is_error', 1),
        ('attributes', {'a': 1}),
        ('attributes', ['a']),
        ('links', 'a'),
        ('links', ['a:b']),
        ('unknown', 1),
    ],
)
def test_a_damaged_field_hides_the_span(field: str, value: object) -> None:
    """A field with another type, or out of range, makes the line invalid."""
    assert parse_span(json.dumps({**asdict(span(1)), field: value}).encode()) is None


def test_damaged_bytes_do_not_end_the_reading(tmp_path: Path) -> None:
    """Bytes that are not text, or not JSON, are skipped."""
    (tmp_path / 'a.jsonl').write_bytes(b'\xff\xfe\n{\n[]\n' + b'[' * 100_000 + b'\n')
    write_spans(tmp_path / 'a.jsonl', [span(1)])
    assert list(read_spans(tmp_path)) == [span(1)]
