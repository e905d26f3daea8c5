"""Operations of datasets as functions that the library `datasets` can send to processes and identify in its cache."""
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from twinkle.data_format import InputFeature
from twinkle.dataset.row_bounds import Row
from twinkle.dataset.row_steps import EncodeTally, encode_batch, is_kept, map_rows, problems_of
from twinkle.dataset.tables import TableRows
from twinkle.preprocessor import FilterFunction, FormatReader, MapFunction
from twinkle.template import Template

ARRAY_COLUMNS = frozenset(InputFeature.__annotations__) - {'length', 'messages', 'samples', 'user_data'}
"""Columns of encoded rows whose values are arrays."""
_PROBLEM = 'problem'


class MapBatch:
    """Applies a preprocessor to a batch; the source of the preprocessor is part of the fingerprint."""

    def __init__(self, function: MapFunction) -> None:
        self._function, self._source = function, _source_of(function)

    def __call__(self, rows: Sequence[Row], begin: int) -> list[Row]:
        return map_rows(rows, self._function, begin=begin)


class KeepRow:
    """Applies a filter to a row; the source of the filter is part of the fingerprint."""

    def __init__(self, function: FilterFunction) -> None:
        self._function, self._source = function, _source_of(function)

    def __call__(self, row: Row, index: int) -> bool:
        return is_kept(row, self._function, index=index)


class FindProblems:
    """Finds the reason why each row of a batch would not be trained on."""

    def __init__(self, template: Template, reader: FormatReader) -> None:
        self._template, self._reader, self._source = template, reader, _source_of(template)

    def __call__(self, rows: Sequence[Row], begin: int) -> list[Row]:
        return [{_PROBLEM: found} for found in problems_of(self._template, self._reader, rows, begin=begin)]


class EncodeBatch:
    """Encodes a batch, and writes its counts to a file in a folder, because a process cannot return them."""

    def __init__(self, template: Template, reader: FormatReader) -> None:
        self._template, self._reader, self._source = template, reader, _source_of(template)
        self._folder = Path()

    def counting_in(self, folder: Path) -> 'EncodeBatch':
        """Return a copy that writes its counts to `folder`, which is not a part of the fingerprint."""
        copied = EncodeBatch(self._template, self._reader)
        copied._folder = folder
        return copied

    def __call__(self, rows: Sequence[Row], begin: int) -> list[Row]:
        chats, encoded = encode_batch(self._template, self._reader, rows, begin=begin)
        tally = EncodeTally(self._template)
        tally.add(encoded)
        (self._folder / uuid4().hex).write_text(json.dumps(tally.counts))
        pairs = zip(chats, encoded, strict=True)
        return [{**row, **feature} for row, chat in pairs for feature in chat.features]


def problems_in(
    rows: TableRows, template: Template, reader: FormatReader, options: Mapping[str, Any]
) -> list[str | None]:
    """Return for each row of a table the reason why it would not be trained on, or None."""
    return rows.texts(FindProblems(template, reader), _PROBLEM, options)


def encoded_table(
    rows: TableRows, template: Template, reader: FormatReader, tally: EncodeTally, options: Mapping[str, Any]
) -> Sequence[Row]:
    """Return the encoded rows of a table, and count their problems.

    The counts are stored beside the rows in the library's cache.
    """
    step = EncodeBatch(template, reader)
    fingerprint = rows.fingerprint_after(step)
    with TemporaryDirectory() as folder:
        changed = rows.changed(step.counting_in(Path(folder)), {**options, 'new_fingerprint': fingerprint})
        counts = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    stored = changed.file if isinstance(changed, TableRows) else None
    path = None if stored is None else stored.with_suffix('.counts.json')
    if counts:
        for part in counts:
            tally.merge(part)
        if path is not None:
            path.write_text(json.dumps(tally.counts))
    elif path is not None:
        with suppress(OSError, ValueError):  # the counts of an earlier run, which another program may have deleted
            tally.merge(json.loads(path.read_text()))
    return TableRows(changed.table, arrays=ARRAY_COLUMNS) if isinstance(changed, TableRows) else changed


def _source_of(component: Any) -> str:
    """Return the source of a function or class, which the library would otherwise identify by its name.

    A chat template that renders the date gives other tokens on another day, so the date is part of its source.
    """
    kind = component if inspect.isroutine(component) else type(component)
    today = (
        datetime.now().astimezone().date().isoformat()
        if isinstance(component, Template) and component.renders_date
        else ''
    )
    with suppress(OSError, TypeError):
        return inspect.getsource(kind) + today
    return today
