"""Arrow columns of each type are read as JSON values, or refused with an error that names the column."""

import json
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest

from twinkle.dataset import DatasetError, UnreadableFile
from twinkle_services.data.backends.bounded import bounded_rows

MOMENT = datetime(2026, 1, 31, 12, 30, 1, 5)  # noqa: DTZ001 - a timestamp without a zone
TEXTS = pa.array(['a', 'b', 'a'])

SUPPORTED: dict[str, tuple[pa.Array, list[Any]]] = {
    'null': (pa.nulls(1), [None]),
    'boolean': (pa.array([True, None]), [True, None]),
    'float16': (pa.array([0.5], pa.float16()), [0.5]),
    **{str(kind): (pa.array([7], kind), [7]) for kind in (pa.int8(), pa.int32(), pa.int64(), pa.uint64())},
    **{str(kind): (pa.array([0.5], kind), [0.5]) for kind in (pa.float32(), pa.float64())},
    'string': (pa.array(['é', None, '']), ['é', None, '']),
    'large string': (pa.array(['é'], pa.large_string()), ['é']),
    'dictionary': (TEXTS.dictionary_encode(), ['a', 'b', 'a']),
    'dictionary of numbers': (pa.array([7, 7]).dictionary_encode(), [7, 7]),
    'dictionary of dates': (pa.array([date(2026, 1, 31)]).dictionary_encode(), ['2026-01-31']),
    'seconds': (pa.array([MOMENT.replace(microsecond=0)], pa.timestamp('s')), ['2026-01-31 12:30:01']),
    'milliseconds': (pa.array([1000], pa.timestamp('ms')), ['1970-01-01 00:00:01.000']),
    'microseconds': (pa.array([MOMENT, None]), ['2026-01-31 12:30:01.000005', None]),
    'nanoseconds': (pa.array([1], pa.timestamp('ns')), ['1970-01-01 00:00:00.000000001']),
    'a named zone': (
        pa.array([datetime(2026, 1, 31, 12, tzinfo=UTC)], pa.timestamp('ms', 'Europe/Berlin')),
        ['2026-01-31 12:00:00.000Z'],
    ),
    'an offset': (pa.array([0], pa.timestamp('ms', '+02:00')), ['1970-01-01 00:00:00.000Z']),
    'the first and the last day': (pa.array([date.min, date.max]), ['0001-01-01', '9999-12-31']),
    'date64': (pa.array([date(2026, 1, 31)], pa.date64()), ['2026-01-31']),
    'time32': (pa.array([time(12, 30)], pa.time32('ms')), ['12:30:00.000']),
    'time64': (pa.array([time(12, 30, 0, 5)]), ['12:30:00.000005']),
    **{
        str(kind): (pa.array([Decimal('1.20')], kind), ['1.20'])
        for kind in (pa.decimal32(5, 2), pa.decimal128(10, 2), pa.decimal256(50, 2))
    },
    'a large decimal': (pa.array([Decimal(10**30)], pa.decimal128(38, 0)), [str(10**30)]),
    'list': (pa.array([[1, None], None, []]), [[1, None], None, []]),
    'large list': (pa.array([[date(2026, 1, 31)]], pa.large_list(pa.date32())), [['2026-01-31']]),
    'list of a fixed size': (pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), [[1, 2], None]),
    'struct': (
        pa.array([{'role': 'u', 'at': MOMENT, 'tags': ['x']}, None]),
        [{'role': 'u', 'at': '2026-01-31 12:30:01.000005', 'tags': ['x']}, None],
    ),
    'map': (
        pa.array([[('a', date(2026, 1, 31))], None], pa.map_(pa.string(), pa.date32())),
        [{'a': '2026-01-31'}, None],
    ),
    'json': (pa.array(['{}'], pa.json_()), ['{}']),
    'truth values as bytes': (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1], pa.int8())), [1]),
}
"""Columns of supported types, with the JSON value of each row."""
REFUSED: dict[str, pa.Array] = {
    'binary': pa.array([b'x']),
    'large binary': pa.array([b'x'], pa.large_binary()),
    'binary of a fixed size': pa.array([b'x'], pa.binary(1)),
    'uuid': pa.array([b'x' * 16], pa.uuid()),
    'duration': pa.array([timedelta(seconds=1)]),
    'a large duration': pa.array([1 << 62], pa.duration('s')),
    'interval': pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
    'map with numbers as keys': pa.array([[(1, 'a')]], pa.map_(pa.int8(), pa.string())),
    'list view': pa.array([[1]], pa.list_view(pa.int8())),
    'string view': pa.array(['x'], pa.string_view()),
    'run-end encoded': pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), pa.array([1])),
    'union': pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])]),
    'dictionary of lists': pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array([[1]])),
    'bytes in a struct': pa.array([{'bytes': b'x'}]),
    'bytes in a list': pa.array([[b'x']]),
    'bytes in a map': pa.array([[('a', b'x')]], pa.map_(pa.string(), pa.binary())),
    'deep structs': pa.nulls(1, reduce(lambda kind, _: pa.struct({'y': kind}), range(70), pa.int8())),
}
"""Columns of types that are refused."""
INVALID: dict[str, pa.Array] = {
    'a year above 9999': pa.array([1 << 60], pa.timestamp('s')),
    'a year below 1': pa.array([-(1 << 60)], pa.timestamp('ms')),
    'a year above 9999 with a zone': pa.array([1 << 60], pa.timestamp('us', 'Asia/Shanghai')),
    'a large date': pa.array([(1 << 31) - 1], pa.int32()).view(pa.date32()),
    'a large time': pa.array([90_000_000], pa.int32()).view(pa.time32('ms')),
    'a large date in a list': pa.array([[1 << 60]], pa.list_(pa.timestamp('s'))),
    'a large date in a dictionary': pa.array([1 << 60], pa.timestamp('s')).dictionary_encode(),
    'a repeated key': pa.array([[('a', 1), ('a', 2)]], pa.map_(pa.string(), pa.int8())),
}
"""Columns of supported types with values that are refused."""


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write a table as Parquet; skip the test if Parquet does not have the table's types."""
    try:
        pa_parquet.write_table(table, path)
    except (pa.ArrowException, OSError) as error:
        pytest.skip(str(error))


def write_arrow(path: Path, table: pa.Table) -> None:
    """Write a table as a compressed Arrow stream; skip the test if its types are nested too deeply for a reader."""
    options = pa.ipc.IpcWriteOptions(compression='zstd')
    try:
        with pa.OSFile(str(path), 'wb') as sink, pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
    except pa.ArrowInvalid as error:
        pytest.skip(str(error))


WRITERS: dict[str, Callable[[Path, pa.Table], None]] = {'parquet': write_parquet, 'arrow': write_arrow}


class Unlimited:
    """Bounds that accept all rows."""

    def charge(self, size_bytes: int, row_count: int = 0) -> None:
        """Accept the rows."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, and check that all values are JSON values."""
    rows = list(bounded_rows(path, Unlimited()))
    assert json.loads(json.dumps(rows)) == rows
    return rows


@pytest.mark.parametrize('suffix', WRITERS)
@pytest.mark.parametrize('name', SUPPORTED)
def test_supported_types_become_json_values(tmp_path: Path, name: str, suffix: str) -> None:
    """A value in a Parquet or Arrow file has the documented form, even within an object; null stays null."""
    array, expected = SUPPORTED[name]
    path = tmp_path / f'rows.{suffix}'
    WRITERS[suffix](path, pa.table({'x': array, 'n': range(len(array))}))
    if suffix == 'parquet' and name == 'seconds':
        pytest.skip('Parquet stores milliseconds')
    assert rows_of(path) == [{'x': value, 'n': index} for index, value in enumerate(expected)]
    WRITERS[suffix](path, pa.table({'x': pa.StructArray.from_arrays([array], ['y'])}))
    assert rows_of(path) == [{'x': {'y': value}} for value in expected]


@pytest.mark.parametrize('suffix', WRITERS)
@pytest.mark.parametrize('name', REFUSED)
def test_other_types_are_refused_by_name(tmp_path: Path, name: str, suffix: str) -> None:
    """A column with another type, at any depth, is refused with the column's name."""
    array = REFUSED[name]
    path = tmp_path / f'rows.{suffix}'
    WRITERS[suffix](path, pa.table({'n': range(len(array)), 'column': array}))
    if suffix == 'parquet' and not pa_parquet.read_schema(path).field('column').type.equals(array.type):
        pytest.skip('Parquet stores another type')
    with pytest.raises(DatasetError, match="'column"):
        rows_of(path)


@pytest.mark.parametrize('suffix', WRITERS)
@pytest.mark.parametrize('name', INVALID)
def test_invalid_values_are_refused_by_name(tmp_path: Path, name: str, suffix: str) -> None:
    """A date or time out of range, or a map with a repeated key, is refused with the column's name."""
    path = tmp_path / f'rows.{suffix}'
    WRITERS[suffix](path, pa.table({'column': INVALID[name]}))
    with pytest.raises(UnreadableFile, match="'column'"):
        rows_of(path)


@pytest.mark.parametrize('suffix', WRITERS)
@pytest.mark.parametrize('kind', [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
@pytest.mark.parametrize('is_nested', [False, True])
def test_text_that_is_not_utf8_is_refused_by_name(
    tmp_path: Path, kind: pa.DataType, suffix: str, *, is_nested: bool
) -> None:
    """Text with invalid bytes is refused with the column's name."""
    values = pa.array([b'\xff\xfe']).view(pa.string()).cast(kind, safe=False)
    path = tmp_path / f'rows.{suffix}'
    column = pa.StructArray.from_arrays([values], ['y']) if is_nested else values
    WRITERS[suffix](path, pa.table({'column': column}))
    with pytest.raises(UnreadableFile, match="'column'"):
        rows_of(path)


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('2026-01-31', '2026-01-31'),
        ('2026-01-31T12:30:01', '2026-01-31T12:30:01'),
        ('2026-01-31 12:30:01+02:00', '2026-01-31 12:30:01+02:00'),
        ('12:30', '12:30'),
        ('true', True),
        ('1.5', 1.5),
        ('7', 7),
        ('', None),
        ('x', 'x'),
    ],
)
def test_csv_keeps_dates_as_text(tmp_path: Path, text: str, expected: Any) -> None:
    """Only numbers, truth values and missing values are converted; dates and times stay text."""
    path = tmp_path / 'rows.csv'
    path.write_text(f'x,n\n{text},1\n')
    assert rows_of(path) == [{'x': expected, 'n': 1}]


@pytest.mark.parametrize('content', [b'column\n\xff\xfe\n', b'\xff\xfe,column\n1,2\n'])
def test_csv_that_is_not_utf8_is_refused(tmp_path: Path, content: bytes) -> None:
    """Invalid bytes are refused in values and in column names."""
    path = tmp_path / 'rows.csv'
    path.write_bytes(content)
    with pytest.raises(DatasetError, match='UTF-8'):
        rows_of(path)


def _repeat_name(path: Path) -> None:
    columns = [pa.array([1]), pa.array([2])]
    if path.suffix == '.csv':
        path.write_text('name,name\n1,2\n')
    elif path.suffix.startswith('.json'):
        path.write_text('{"name": 1, "name": 2}\n' if path.suffix == '.jsonl' else '[{"name": 1, "name": 2}]')
    else:
        WRITERS[path.suffix[1:]](path, pa.table(columns, names=['name', 'name']))


@pytest.mark.parametrize('suffix', ['jsonl', 'json', 'parquet', 'csv', 'arrow'])
def test_two_columns_with_one_name_are_refused(tmp_path: Path, suffix: str) -> None:
    """A file with two columns of the same name is refused, because a row can contain only one of them."""
    path = tmp_path / f'rows.{suffix}'
    _repeat_name(path)
    with pytest.raises(DatasetError, match="'name'"):
        rows_of(path)


@pytest.mark.parametrize('suffix', WRITERS)
def test_two_fields_with_one_name_are_refused(tmp_path: Path, suffix: str) -> None:
    """Two fields of the same name are refused with the column's name, because an object can contain only one."""
    path = tmp_path / f'rows.{suffix}'
    fields = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ['name', 'name'])
    WRITERS[suffix](path, pa.table({'column': fields}))
    with pytest.raises(DatasetError, match="'column'"):
        rows_of(path)
