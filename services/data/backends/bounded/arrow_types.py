"""Supported types of Arrow columns, and the conversion of their values to JSON values.

Dates, times and decimals become strings, and maps with string keys become objects; docs/datasets.md lists all types.
All other types are refused with an error that names the column.
"""
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from twinkle.dataset import DatasetError, UnreadableFile
from twinkle_services.data.backends.bounded.json_files import MAX_DEPTH

_KEPT = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_string,
    pa.types.is_large_string,
)
_WRITTEN_AS_TEXT = (pa.types.is_date, pa.types.is_time, pa.types.is_timestamp, pa.types.is_decimal)
_BINARY = (
    pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view,
)  # fmt: skip
_TEXT_INDICES = pa.dictionary(pa.int32(), pa.string())
"""Type in which strings are read from Parquet files."""


def refuse_duplicates(names: Sequence[str], location: str = '') -> None:
    """Raise an error if two columns have the same name, because a row can contain the value of only one column.

    Args:
        names: the names of all columns.
        location: path of the column that contains them; empty for the columns of the file.

    Raises:
        DatasetError: a name occurs twice.
    """
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        place = f'column {location!r} has' if location else 'the file has'
        raise DatasetError(f'{place} several columns with the name {repeated[0]!r}; give each column its own name')


def json_types(schema: Any) -> tuple[Any, Any]:
    """Return two schemas; casting a table to the first and then to the second makes its rows JSON values.

    The first schema converts time zones to UTC, and the second schema converts values to strings.

    Raises:
        DatasetError: two columns have the same name, or a column is nested too deeply or has a type that rows cannot
            have.
        UnreadableFile: the name of a column is not UTF-8 text.
    """
    try:
        refuse_duplicates(schema.names)
        in_utc = _with_leaves(schema, _in_utc)
        return in_utc, _with_leaves(in_utc, _as_json)
    except UnicodeDecodeError as error:
        raise UnreadableFile('the name of a column is not UTF-8 text; rename the column') from error


_Convert = Callable[[str, Any], Any]
"""Function from the path and the type of a column to the converted type; not called for lists, structs and maps."""


def _with_leaves(schema: Any, convert: _Convert) -> Any:
    return pa.schema([field.with_type(_converted(field.name, field.type, convert)) for field in schema])


def _converted(path: str, kind: Any, convert: _Convert, depth: int = 1) -> Any:
    if depth > MAX_DEPTH:
        raise DatasetError(f'column {path!r} is nested more than {MAX_DEPTH} levels deep')
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_struct(kind):
        refuse_duplicates([field.name for field in kind], path)
        inner = [(field, _converted(f'{path}.{field.name}', field.type, convert, depth + 1)) for field in kind]
        return pa.struct([field.with_type(converted) for field, converted in inner])
    if pa.types.is_map(kind):
        if not pa.types.is_string(kind.key_type) and kind.key_type != _TEXT_INDICES:
            raise _refusal(path, kind, 'use strings as the keys of the map')
        item = _converted(f'{path}.value', kind.item_type, convert, depth + 1)
        return pa.map_(kind.key_field.with_type(pa.string()), kind.item_field.with_type(item))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item = kind.value_field.with_type(_converted(f'{path}[]', kind.value_type, convert, depth + 1))
        if pa.types.is_fixed_size_list(kind):
            if kind.list_size <= 0:
                raise _refusal(path, kind, 'use lists of variable size')
            return pa.list_(item, kind.list_size)
        return pa.large_list(item) if pa.types.is_large_list(kind) else pa.list_(item)
    if pa.types.is_dictionary(kind) and not pa.types.is_nested(kind.value_type):
        values = _converted(path, kind.value_type, convert, depth)
        return kind if values == kind.value_type else values
    return convert(path, kind)


def _in_utc(_path: str, kind: Any) -> Any:
    return pa.timestamp(kind.unit, 'UTC') if pa.types.is_timestamp(kind) and kind.tz is not None else kind


def _as_json(path: str, kind: Any) -> Any:
    if any(is_kind(kind) for is_kind in _KEPT):
        return kind
    if any(is_kind(kind) for is_kind in _WRITTEN_AS_TEXT):
        return pa.string()
    if any(is_kind(kind) for is_kind in _BINARY):
        raise _refusal(path, kind, 'encode strings as UTF-8, or remove the column')
    if pa.types.is_duration(kind) or pa.types.is_interval(kind):
        raise _refusal(path, kind, 'store the length as a number')
    raise _refusal(path, kind, 'store plain numbers, strings, lists and structs')


def _refusal(path: str, kind: Any, cure: str) -> DatasetError:
    return DatasetError(f'column {path!r} has the type {kind}, which rows cannot have; {cure}')
