"""Rows on disk: single rows can be read, and the digest of a table depends only on its content."""

from pathlib import Path

import numpy as np

from twinkle_services.data.backends.row_files import RowFiles, write_rows
from twinkle_services.data.domain import Table


def encoded(count: int, *, seed: int = 0, is_packed: bool = False) -> Table:
    """Return rows of different lengths in the format of `encode`."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        length = int(rng.integers(1, 9))
        ids = rng.integers(0, 100, length).astype(np.int32)
        rows.append(
            {
                'messages': [{'role': 'user', 'content': f'é{index}'}],
                'input_ids': ids,
                'labels': -ids,
                'position_ids': np.arange(length, dtype=np.int32),
                'attention_mask': np.ones(length, dtype=np.int32),
                'length': length,
            }
        )
    return Table(rows=rows, is_encoded=True, is_packed=is_packed)


def write_and_open(folder: Path, table: Table) -> tuple[RowFiles, str]:
    """Write a table, and return its open files and its digest."""
    folder.mkdir()
    digest = write_rows(folder, table)
    return RowFiles(folder), digest


def test_encoded_rows_are_read_in_any_order(tmp_path: Path) -> None:
    """Rows keep their tokens and other columns, except columns that are derived from the length."""
    table = encoded(7)
    files, _ = write_and_open(tmp_path / 'a', table)
    rows = files.read([6, 0, 3])
    for row, index in zip(rows, [6, 0, 3], strict=True):
        source = table.rows[index]
        np.testing.assert_array_equal(row['input_ids'], source['input_ids'])
        np.testing.assert_array_equal(row['labels'], source['labels'])
        assert row['messages'] == source['messages']
        assert set(row) == {'messages', 'input_ids', 'labels'}


def test_positions_of_packed_rows_are_stored(tmp_path: Path) -> None:
    """Positions that restart within a row are stored, because the length does not determine them."""
    files, _ = write_and_open(tmp_path / 'a', encoded(2, is_packed=True))
    assert 'position_ids' in files.read([0])[0]


def test_plain_rows_are_read_unchanged(tmp_path: Path) -> None:
    """Rows that are not encoded keep all columns, even columns with the names of token columns."""
    rows = [{'x': 1, 'length': 'long', 'y': None}, {'x': 2, 'length': 'short', 'y': [1.5]}]
    files, _ = write_and_open(tmp_path / 'a', Table(rows=rows))
    assert list(files) == rows


def test_empty_tables_can_be_stored(tmp_path: Path) -> None:
    """A table without rows can be written and read."""
    for name, table in {'plain': Table(rows=[]), 'encoded': Table(rows=[], is_encoded=True)}.items():
        files, _ = write_and_open(tmp_path / name, table)
        assert list(files) == []


def test_digest_depends_on_the_content(tmp_path: Path) -> None:
    """Equal rows have equal digests, and rows with different tokens have different digests."""
    digests = [
        write_and_open(tmp_path / name, encoded(5, seed=seed))[1] for name, seed in {'a': 1, 'b': 1, 'c': 2}.items()
    ]
    assert digests[0] == digests[1] != digests[2]


def test_open_rows_are_readable_after_deletion(tmp_path: Path) -> None:
    """Open rows remain readable after their files are deleted."""
    files, _ = write_and_open(tmp_path / 'a', encoded(3))
    for path in (tmp_path / 'a').iterdir():
        path.unlink()
    assert len(files.read([0, 1, 2])) == 3
