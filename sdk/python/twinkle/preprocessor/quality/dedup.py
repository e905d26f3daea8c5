"""Filter for duplicates of earlier rows."""

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle.preprocessor.base import Row
from twinkle.preprocessor.errors import InvalidArguments, InvalidRow
from twinkle.preprocessor.quality.base import Drop, QualityFilter
from twinkle.preprocessor.quality.chat import COLUMN, messages_of, texts_of
from twinkle.preprocessor.quality.fingerprint import fingerprint
from twinkle.preprocessor.quality.minhash import NearIndex, signature

_COLUMNS = (COLUMN, 'tools', 'images', 'videos', 'audios')
_NUMBER = re.compile(r'\d+')


class DedupFilter(QualityFilter):
    """Keeps only the first of equal or nearly equal rows.

    Exact duplicates are equal in all compared columns, except for whitespace. Near duplicates have texts with a Jaccard
    similarity of at least `threshold` over their substrings of 8 characters (estimated by MinHash), and equal numbers,
    system messages, images and tools. Rows with objects that cannot be compared are never duplicates.

    Only a limited number of recent rows of the current iteration are remembered, so duplicates that are further apart
    are kept.
    """

    def __init__(
        self,
        *,
        columns: Sequence[str] = _COLUMNS,
        threshold: float = 0.9,
        memory: int = 1_000_000,
        near_memory: int = 50_000,
    ) -> None:
        """Set the compared columns and the limits.

        Args:
            columns: columns to compare, at least one; missing columns are ignored. Columns that are not listed, such as
                `user_data`, may differ. Default: the messages, tools and media.
            threshold: minimum similarity of near duplicates, in (0, 1]; 1 removes only exact duplicates. Default: 0.9.
            memory: number of rows remembered for exact duplicates, about 150 bytes each. Default: 1,000,000.
            near_memory: number of rows remembered for near duplicates, about 5 KB each. Default: 50,000.

        Raises:
            InvalidArguments: `columns` is empty or not a list, or a number is out of range.
        """
        if isinstance(columns, str) or not columns:
            raise InvalidArguments('columns must be a list of at least one column name')
        if not 0.0 < threshold <= 1.0:
            raise InvalidArguments(f'threshold must be in (0, 1], got {threshold}; 1 removes only exact duplicates')
        for name, value in (('memory', memory), ('near_memory', near_memory)):
            if value < 1:
                raise InvalidArguments(f'{name} must be at least 1, got {value}')
        self.columns = list(columns)
        self.threshold = threshold
        self.memory, self.near_memory = memory, near_memory
        self.begin_pass()

    def begin_pass(self) -> None:
        """Reset the counters and remove all recorded rows."""
        super().begin_pass()
        self._exact: OrderedDict[bytes, int] = OrderedDict()
        self._near = NearIndex(self.threshold, self.near_memory)

    def drop_of(self, row: Row) -> Drop | None:
        """Return a `Drop` that names the earlier row if the row is a duplicate; otherwise record it and return None."""
        compared = {name: row[name] for name in self.columns if row.get(name) is not None}
        if not compared:
            raise InvalidRow(self.columns[0], f'is missing; the row needs at least one of {", ".join(self.columns)}')
        text = _text_of(compared)
        exact = fingerprint(compared)
        if exact is None:
            return None
        if exact in self._exact:
            return Drop('duplicate', f'is equal to row {self._exact[exact]}')
        drop = self._near_drop(compared, text)
        if drop is None:
            while len(self._exact) >= self.memory:
                self._exact.popitem(last=False)
            self._exact[exact] = self.row_index
        return drop

    def _near_drop(self, compared: Row, text: str) -> Drop | None:
        if self.threshold >= 1.0 or not text.strip():
            return None
        guard = fingerprint([_NUMBER.findall(text), _non_text_values(compared)]) or b''
        sketch = signature(text)
        found = self._near.find(sketch, guard)
        if found is not None:
            return Drop('near_duplicate', f'is {found[1]:.0%} similar to row {found[0]}')
        self._near.add(self.row_index, sketch, guard)
        return None


def _text_of(compared: Row) -> str:
    """Return the text for the similarity: all messages except system messages, and the text columns."""
    texts = [value for name, value in compared.items() if name != COLUMN and isinstance(value, str)]
    if COLUMN in compared:
        messages = messages_of(compared)
        for index, message in enumerate(messages):
            if message['role'] != 'system':
                texts += [message['role'], *texts_of(message, index)]
    return '\n'.join(texts)


def _non_text_values(compared: Row) -> list[Any]:
    """Return the values that must be equal in near duplicates: system messages, non-text parts and other columns."""
    values: list[Any] = [value for name, value in compared.items() if name != COLUMN and not isinstance(value, str)]
    for message in messages_of(compared) if COLUMN in compared else []:
        content = message.get('content')
        if message['role'] == 'system':
            values.append(content)
        elif isinstance(content, list):
            parts = cast('list[Any]', content)
            values += [part for part in parts if isinstance(part, Mapping) and 'text' not in part]
    return values
