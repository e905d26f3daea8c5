"""Checks and converts the values of Arrow arrays that were read from files of untrusted callers."""
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.compute as pa_compute

from twinkle.dataset import UnreadableFile
from twinkle_services.data.backends.bounded.arrow_sizes import parts_of

Row = dict[str, Any]

_COMPUTE: Any = pa_compute  # pyarrow generates these functions when it is imported
_UNITS = {'s': 1, 'ms': 1_000, 'us': 1_000_000, 'ns': 1_000_000_000}
"""Units per second."""
_DAY_SECONDS = 24 * 60 * 60
_EPOCH = date(1970, 1, 1)
_FIRST_DAY, _END_DAY = (date.min - _EPOCH).days, (date.max - _EPOCH).days + 1
"""First day of the year 1 and the day after the year 9999, in days since 1970; pyarrow cannot write other years as
text."""


def check_values(batch: Any) -> None:
    """Check that all values of a batch are valid, because pyarrow reads the memory that they refer to.

    Raises:
        UnreadableFile: an offset or an index is out of range, a text is not UTF-8, or a date or time is not between the
            years 1 and 9999.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise UnreadableFile(f'column {name!r} has invalid values: {error}; write the file again') from error
        _check_moments(name, column)


def rows_of(batch: Any, types: tuple[Any, Any]) -> list[Row]:
    """Return the rows of a batch as JSON values.

    Args:
        batch: a `pyarrow.RecordBatch` with valid values.
        types: the result of `json_types`.

    Raises:
        UnreadableFile: a map has a key twice.
    """
    rows: list[Row] = [{} for _ in range(batch.num_rows)]
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        in_utc, as_json = (schema.field(name).type for schema in types)
        try:
            values = column.cast(in_utc).cast(as_json).to_pylist(maps_as_pydicts='strict')
        except KeyError as error:
            raise UnreadableFile(f'column {name!r} has a map with the same key twice') from error
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows


def _check_moments(name: str, array: Any) -> None:
    for part in parts_of(array):
        _check_moments(name, part)
    values = array.dictionary if pa.types.is_dictionary(array.type) else array
    if pa.types.is_temporal(values.type):
        extremes = _COMPUTE.min_max(values)
        begin, end = _permitted(values.type)
        if any(extreme.is_valid and not begin <= extreme.value < end for extreme in extremes.values()):
            raise UnreadableFile(f'column {name!r} has a {values.type} that is not between the years 1 and 9999')


def _permitted(kind: Any) -> tuple[int, int]:
    """Return the first permitted value of a type, and the value after the last one."""
    if pa.types.is_date32(kind):
        return _FIRST_DAY, _END_DAY
    units_per_day = _DAY_SECONDS * (1000 if pa.types.is_date64(kind) else _UNITS[kind.unit])
    return (0, units_per_day) if pa.types.is_time(kind) else (_FIRST_DAY * units_per_day, _END_DAY * units_per_day)
