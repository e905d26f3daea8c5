"""Rows on the disk are read back one by one, and their digest is that of what is read."""

from pathlib import Path

import numpy as np

from services.data.backends.row_files import RowFiles, write_rows
from services.data.domain import Table


def encoded(count: int, *, seed: int = 0, is_packed: bool = False) -> Table:
    """Rows of different lengths, as `encode` makes them."""
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


def written(folder: Path, table: Table) -> tuple[RowFiles, str]:
    """Write a table and open what was written."""
    folder.mkdir()
    digest = write_rows(folder, table)
    return RowFiles(folder), digest


def test_encoded_rows_are_read_in_any_order(tmp_path: Path) -> None:
    """Tokens and other columns come back; what the length implies is not kept."""
    table = encoded(7)
    files, _ = written(tmp_path / 'a', table)
    rows = files.read([6, 0, 3])
    for row, index in zip(rows, [6, 0, 3], strict=True):
        source = table.rows[index]
        np.testing.assert_array_equal(row['input_ids'], source['input_ids'])
        np.testing.assert_array_equal(row['labels'], source['labels'])
        assert row['messages'] == source['messages']
        assert set(row) == {'messages', 'input_ids', 'labels'}


def test_positions_are_kept_for_packs(tmp_path: Path) -> None:
    """Where positions restart, they cannot be told from the length."""
    files, _ = written(tmp_path / 'a', encoded(2, is_packed=True))
    assert 'position_ids' in files.read([0])[0]


def test_plain_rows_are_read_as_they_were(tmp_path: Path) -> None:
    """Rows that are not encoded are JSON, whatever their columns are called."""
    rows = [{'x': 1, 'length': 'long', 'y': None}, {'x': 2, 'length': 'short', 'y': [1.5]}]
    files, _ = written(tmp_path / 'a', Table(rows=rows))
    assert list(files) == rows


def test_empty_tables_are_kept_too(tmp_path: Path) -> None:
    """No rows are an answer as well."""
    for name, table in {'plain': Table(rows=[]), 'encoded': Table(rows=[], is_encoded=True)}.items():
        files, _ = written(tmp_path / name, table)
        assert list(files) == []


def test_digest_is_of_the_content(tmp_path: Path) -> None:
    """The same rows have the same digest; other tokens have another."""
    digests = [written(tmp_path / name, encoded(5, seed=seed))[1] for name, seed in {'a': 1, 'b': 1, 'c': 2}.items()]
    assert digests[0] == digests[1] != digests[2]


def test_open_rows_outlive_their_files(tmp_path: Path) -> None:
    """A stream goes on while its dataset is deleted."""
    files, _ = written(tmp_path / 'a', encoded(3))
    for path in (tmp_path / 'a').iterdir():
        path.unlink()
    assert len(files.read([0, 1, 2])) == 3
