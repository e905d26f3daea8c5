"""Files of untrusted callers are read within bounds: content that is too large is refused before it is decoded."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest

from twinkle.dataset import DatasetError, UnreadableFile, read_rows
from twinkle.dataset import write_rows as write_file
from twinkle.dataset.row_bounds import MAX_COLUMNS
from twinkle_services.data.backends.bounded import bounded_rows

ROWS = [{'a': 1, 'b': 'é, "x"\ny', 'c': None}, {'a': 2, 'b': 'z', 'c': 'd'}]
NESTED: list[dict[str, Any]] = [
    {'messages': [{'role': 'user', 'content': f'text {row}'}], 'tags': ['x', 'y'], 'scores': [0.5, row]}
    for row in range(2500)
]


class Full(Exception):
    """The bounds refuse more bytes."""


class Counted:
    """Bounds that count bytes and rows up to a limit."""

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = self.peak_bytes = self.row_count = 0

    def charge(self, size_bytes: int, row_count: int = 0) -> None:
        """Count bytes and rows."""
        if self.size_bytes + size_bytes > self.limit_bytes:
            raise Full
        self.size_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.size_bytes)
        self.row_count += row_count


def repeated(path: Path, values: pa.Array, *, row_count: int, **options: Any) -> Path:
    """Write a Parquet file with one column that repeats a value; check that the file is small, and return its path."""
    indices = pa.array([0] * row_count, pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, values)
    pa_parquet.write_table(pa.table({'x': column}), path, compression='zstd', **options)
    assert path.stat().st_size < 200_000
    return path


@pytest.mark.parametrize('rows', [ROWS, NESTED])
@pytest.mark.parametrize('suffix', ['jsonl', 'json', 'parquet', 'csv', 'arrow'])
def test_bounded_rows_equal_the_rows_of_the_file(tmp_path: Path, suffix: str, rows: list[dict[str, Any]]) -> None:
    """All formats give the same rows as in process, except that an empty CSV value is a text; every row is counted."""
    if suffix == 'csv' and rows is NESTED:
        rows = [{'a': row['scores'][1], 'b': row['tags'][0]} for row in rows]
    path = tmp_path / f'rows.{suffix}'
    if suffix == 'json':
        path.write_text(json.dumps(rows))
    else:
        write_file(path, rows)
    bounds = Counted()
    found = [{name: value or None for name, value in row.items()} for row in bounded_rows(path, bounds)]
    assert found == [{name: value or None for name, value in row.items()} for row in read_rows(path)]
    assert (bounds.row_count, bounds.size_bytes > 0) == (len(rows), True)


BOMBS: dict[str, Any] = {
    'one repeated text': lambda path: repeated(path, pa.array(['x' * 2000]), row_count=300_000),
    'one repeated long text': lambda path: repeated(path, pa.array(['x' * (8 << 20)]), row_count=20),
    'large text': lambda path: repeated(path, pa.array(['x' * 2000], pa.large_string()), row_count=300_000),
    'no stored schema': lambda path: repeated(path, pa.array(['x' * 2000]), row_count=300_000, store_schema=False),
    'nulls': lambda path: _written(path, pa.table({'x': pa.nulls(10_000_000)})),
    'one number': lambda path: _written(path, pa.table({'x': pa.repeat(pa.scalar(7), 10_000_000)})),
    'a list in one row': lambda path: _written(path, pa.table({'x': pa.array([['x' * 2000] * 100_000])})),
    'a struct': lambda path: _written(path, pa.table({'x': pa.array([{'y': ['x' * 2000] * 1000}] * 100)})),
}
"""Functions that write a small Parquet file that decodes to large content."""


ARROW_BOMBS: dict[str, pa.Table] = {
    'one repeated text': pa.table({'x': ['x' * 2000] * 50_000}),
    'one repeated number': pa.table({'x': pa.repeat(pa.scalar(7), 10_000_000)}),
    'a large dictionary': pa.table({'x': pa.array(['x' * (80 << 20)]).dictionary_encode()}),
    'one repeated text of a dictionary': pa.table(
        {'x': pa.DictionaryArray.from_arrays(pa.array([0] * 300_000, pa.int32()), pa.array(['x' * 2000]))}
    ),
    'nulls': pa.table({'x': pa.nulls(10_000_000)}),
    'nulls in one row': pa.table({'x': pa.FixedSizeListArray.from_arrays(pa.nulls(10_000_000), 10_000_000)}),
    'empty objects in one row': pa.table({'x': [[{}] * 400_000]}, schema=pa.schema({'x': pa.list_(pa.struct([]))})),
    'long characters': pa.table({'x': ['x' * (20 << 20) + chr(0x1F600)]}),
}
"""Tables that are small when compressed and large when decoded."""


def arrow_file(path: Path, table: pa.Table, *, compression: str | None, is_stream: bool) -> Path:
    """Write a table as a compressed Arrow file or stream in one batch, and return the path."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    opened = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with pa.OSFile(str(path), 'wb') as sink, opened(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize('is_stream', [False, True], ids=['file', 'stream'])
@pytest.mark.parametrize('compression', ['zstd', 'lz4'])
@pytest.mark.parametrize('name', ARROW_BOMBS)
def test_compressed_arrow_files_are_refused_before_they_are_decoded(
    tmp_path: Path, name: str, compression: str, *, is_stream: bool
) -> None:
    """A small file that decodes to over 64 MiB is refused, and pyarrow then has less than 1 MiB allocated."""
    path = arrow_file(tmp_path / 'rows.arrow', ARROW_BOMBS[name], compression=compression, is_stream=is_stream)
    assert path.stat().st_size < 3 << 20
    before, bounds = pa.total_allocated_bytes(), Counted(64 << 20)
    with pytest.raises(Full):
        list(bounded_rows(path, bounds))
    assert pa.total_allocated_bytes() - before < 1 << 20
    assert bounds.peak_bytes <= 64 << 20


def _written(path: Path, table: pa.Table) -> Path:
    pa_parquet.write_table(table, path, compression='zstd')
    assert path.stat().st_size < 200_000
    return path


@pytest.mark.slow
@pytest.mark.parametrize('name', BOMBS)
def test_compressed_parquet_files_are_refused_before_they_are_decoded(tmp_path: Path, name: str) -> None:
    """A small file that decodes to over 64 MiB is refused, and pyarrow has less than 33 MiB allocated at each row."""
    path = BOMBS[name](tmp_path / 'rows.parquet')
    before = pa.total_allocated_bytes()
    bounds = Counted(64 << 20)
    rows = ((row, pa.total_allocated_bytes()) for row in bounded_rows(path, bounds))
    allocated: list[int] = []
    with pytest.raises(Full):
        allocated.extend(total for _, total in rows)
    # One page has four rows of the longest text, 32 MiB in total; all other files stay below 1 MiB.
    assert max(allocated, default=before) - before < 33 << 20
    assert bounds.peak_bytes <= 64 << 20


@pytest.mark.parametrize(
    ('suffix', 'content'),
    [
        ('jsonl', '{"x": [' + '[],' * 100_000 + '0]}\n'),
        ('jsonl', '{"x": ""}\n' * 30_000),
        ('json', '[' + '{},' * 100_000 + '{}]'),
        ('json', '[{"x": [' + '[],' * 100_000 + '0]}]'),
        ('json', '[' + '{"x":{"y":[]}},' * 30_000 + '{}]'),
        ('json', '[{"x": "' + '\\u4e2d' * 100_000 + 'x' * 300_000 + '"}]'),
        ('csv', 'a,b\n' + '1,2\n' * 50_000),
        ('csv', ','.join(f'c{index}' for index in range(4000)) + '\n' + (',' * 3999 + '\n') * 100),
    ],
)
def test_text_files_that_grow_when_parsed_are_refused(tmp_path: Path, suffix: str, content: str) -> None:
    """Text that takes many times its size once parsed is refused, although the file is below the limit."""
    path = tmp_path / f'rows.{suffix}'
    path.write_text(content)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(Full):
        list(bounded_rows(path, Counted(1 << 20)))


def test_too_many_columns_are_refused_in_every_format(tmp_path: Path) -> None:
    """The number of columns of all rows together is limited, and the error contains the limit."""
    wide = {f'c{index}': 1 for index in range(MAX_COLUMNS + 1)}
    files = [tmp_path / f'rows.{suffix}' for suffix in ('jsonl', 'parquet', 'csv', 'arrow')]
    for path in files:
        write_file(path, [wide])
    different = tmp_path / 'different.jsonl'
    different.write_text(''.join(json.dumps({name: 1}) + '\n' for name in wide))
    for path in (*files, different):
        with pytest.raises(DatasetError, match=str(MAX_COLUMNS)):
            list(bounded_rows(path, Counted()))


def test_line_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """The length of a line is limited, because a line is parsed in one step."""
    path = tmp_path / 'rows.jsonl'
    path.write_text('{"x": "' + 'x' * (8 << 20) + '"}')
    with pytest.raises(UnreadableFile, match='line'):
        list(bounded_rows(path, Counted()))


@pytest.mark.parametrize('name', ['a.jsonl', 'a.json', 'a.parquet', 'a.csv', 'a.arrow', 'a.txt'])
def test_damaged_files_are_refused(tmp_path: Path, name: str) -> None:
    """A file whose content does not match its suffix is refused, and none of its bytes remain counted."""
    path = tmp_path / name
    path.write_bytes(b'\xff\xfe"\x00,{')
    bounds = Counted()
    with pytest.raises(UnreadableFile, match='a\\.'):
        list(bounded_rows(path, bounds))
    assert bounds.size_bytes == 0
