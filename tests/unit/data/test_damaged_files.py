"""Damaged Parquet and Arrow files are refused or read as rows, and never crash the process."""

import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest

from twinkle.dataset import DatasetError, UnreadableFile
from twinkle_services.data.backends.bounded import bounded_rows
from twinkle_services.data.backends.bounded.parquet_footer import MAX_FOOTER_BYTES, ColumnSize, column_sizes

TABLE = pa.table(
    {
        'text': ['one', 'two', None] * 20,
        'flag': [True, False, None] * 20,
        'list': [[1, 2], [], None] * 20,
        'index': pa.array(['a', 'b', 'a'] * 20).dictionary_encode(),
        'object': [{'x': 1.5, 'y': ['z']}] * 60,
    }
)


class Full(Exception):
    """The bounds refuse more bytes."""


class Bounds:
    """Bounds of 64 MiB."""

    size_bytes = 0

    def charge(self, size_bytes: int, row_count: int = 0) -> None:
        """Count bytes."""
        del row_count
        if self.size_bytes + size_bytes > 64 << 20:
            raise Full
        self.size_bytes += size_bytes


def write_arrow(path: Path) -> None:
    """Write a compressed Arrow file."""
    options = pa.ipc.IpcWriteOptions(compression='lz4')
    with pa.OSFile(str(path), 'wb') as sink, pa.ipc.new_file(sink, TABLE.schema, options=options) as writer:
        writer.write_table(TABLE, max_chunksize=25)


WRITERS: dict[str, Callable[[Path], None]] = {
    'parquet': lambda path: pa_parquet.write_table(TABLE, path, row_group_size=25),
    'arrow': write_arrow,
}


@pytest.mark.parametrize('suffix', WRITERS)
def test_file_with_changed_bytes_is_refused_or_read(tmp_path: Path, suffix: str) -> None:
    """Reading a file with a changed byte gives rows, or raises the bounds' error or a DatasetError."""
    path, rng = tmp_path / f'rows.{suffix}', random.Random(0)
    WRITERS[suffix](path)
    content, refused = path.read_bytes(), 0
    for _ in range(600):
        damaged = bytearray(content)
        damaged[rng.randrange(len(damaged))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        path.write_bytes(damaged)
        bounds = Bounds()
        try:
            assert all(isinstance(row, dict) for row in bounded_rows(path, bounds))
        except (DatasetError, Full):
            refused += 1
    assert refused > 100


@pytest.mark.parametrize('suffix', WRITERS)
def test_file_that_ends_early_is_refused(tmp_path: Path, suffix: str) -> None:
    """A truncated file is refused, because it lacks rows."""
    path = tmp_path / f'rows.{suffix}'
    WRITERS[suffix](path)
    content = path.read_bytes()
    for size in range(0, len(content), 97):
        path.write_bytes(content[:size])
        with pytest.raises(UnreadableFile):
            list(bounded_rows(path, Bounds()))


def test_sizes_of_a_footer_equal_those_of_pyarrow(tmp_path: Path) -> None:
    """The sizes that are read from the footer equal those that pyarrow reads, in the same order."""
    path = tmp_path / 'rows.parquet'
    WRITERS['parquet'](path)
    metadata = pa_parquet.read_metadata(path)
    columns = [
        metadata.row_group(group).column(index)
        for group in range(metadata.num_row_groups)
        for index in range(metadata.num_columns)
    ]
    assert column_sizes(path) == [ColumnSize(column.num_values, column.total_uncompressed_size) for column in columns]


def test_large_footer_is_refused(tmp_path: Path) -> None:
    """The size of a footer is limited, because a footer is read in one step."""
    path = tmp_path / 'rows.parquet'
    size_bytes = MAX_FOOTER_BYTES + 1
    path.write_bytes(bytes(size_bytes) + size_bytes.to_bytes(4, 'little') + b'PAR1')
    with pytest.raises(UnreadableFile, match='footer'):
        list(bounded_rows(path, Bounds()))
