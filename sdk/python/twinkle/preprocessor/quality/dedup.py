"""Rows that say what an earlier row has said."""

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle.preprocessor.base import Row
from twinkle.preprocessor.errors import InvalidArguments, InvalidRow
from twinkle.preprocessor.quality.base import Drop, QualityFilter
from twinkle.preprocessor.quality.chat import COLUMN, messages_of, said
from twinkle.preprocessor.quality.fingerprint import fingerprint
from twinkle.preprocessor.quality.minhash import NearIndex, signature

_COLUMNS = (COLUMN, 'tools', 'images', 'videos', 'audios')
_NUMBER = re.compile(r'\d+')


class DedupFilter(QualityFilter):
    """Keeps the first of rows that say the same, or nearly the same.

    Exact: all columns compared are equal but for blanks. Near: the texts share most of their pieces of 8 characters
    (a resemblance of `threshold`, estimated by MinHash), while the numbers in them, the system message, images and
    tools are equal. A row whose images cannot be read is never taken for another.

    It remembers rows for one pass, and of them the last ones only: duplicates further apart than that stay.
    """

    def __init__(
        self,
        *,
        columns: Sequence[str] = _COLUMNS,
        threshold: float = 0.9,
        memory: int = 1_000_000,
        near_memory: int = 50_000,
    ) -> None:
        """Set what counts as the same.

        Args:
            columns: compared; what a row does not have is left out. Others, such as user_data, may differ.
            threshold: least resemblance of near duplicates, in (0, 1]. 1: only exact duplicates are left out.
            memory: rows remembered exactly, about 150 bytes each.
            near_memory: rows remembered by their sketch, about 5 KB each.

        Raises:
            InvalidArguments: there is no column, or a number is out of its range.
        """
        if isinstance(columns, str) or not columns:
            raise InvalidArguments('columns must be a list of at least one column name')
        if not 0.0 < threshold <= 1.0:
            raise InvalidArguments(f'threshold must be in (0, 1], got {threshold}; 1 is for exact duplicates alone')
        for name, value in (('memory', memory), ('near_memory', near_memory)):
            if value < 1:
                raise InvalidArguments(f'{name} must be at least 1, got {value}')
        self.columns = list(columns)
        self.threshold = threshold
        self.memory, self.near_memory = memory, near_memory
        self.begin_pass()

    def begin_pass(self) -> None:
        """Forget all rows."""
        super().begin_pass()
        self._exact: OrderedDict[bytes, int] = OrderedDict()
        self._near = NearIndex(self.threshold, self.near_memory)

    def drop_of(self, row: Row) -> Drop | None:
        """Return which earlier row says the same; remember this one where there is none."""
        compared = {name: row[name] for name in self.columns if row.get(name) is not None}
        if not compared:
            raise InvalidRow(self.columns[0], f'is missing, and so is every other of {", ".join(self.columns)}')
        text = _text_of(compared)
        exact = fingerprint(compared)
        if exact is None:
            return None
        if exact in self._exact:
            return Drop('duplicate', f'says the same as row {self._exact[exact]}')
        drop = self._near_drop(compared, text)
        if drop is None:
            while len(self._exact) >= self.memory:
                self._exact.popitem(last=False)
            self._exact[exact] = self.row_index
        return drop

    def _near_drop(self, compared: Row, text: str) -> Drop | None:
        if self.threshold >= 1.0 or not text.strip():
            return None
        guard = fingerprint([_NUMBER.findall(text), _beside_text(compared)]) or b''
        sketch = signature(text)
        found = self._near.find(sketch, guard)
        if found is not None:
            return Drop('near_duplicate', f'is {found[1]:.0%} like row {found[0]}')
        self._near.add(self.row_index, sketch, guard)
        return None


def _text_of(compared: Row) -> str:
    """Return what is compared as text: the turns of a chat but the system's, and columns that are text."""
    texts = [value for name, value in compared.items() if name != COLUMN and isinstance(value, str)]
    if COLUMN in compared:
        messages = messages_of(compared)
        for index, message in enumerate(messages):
            if message['role'] != 'system':
                texts += [message['role'], *said(message, index)]
    return '\n'.join(texts)


def _beside_text(compared: Row) -> list[Any]:
    """Return what has to be equal in near duplicates: the system message, parts that are no text, other columns."""
    beside: list[Any] = [value for name, value in compared.items() if name != COLUMN and not isinstance(value, str)]
    for message in messages_of(compared) if COLUMN in compared else []:
        content = message.get('content')
        if message['role'] == 'system':
            beside.append(content)
        elif isinstance(content, list):
            parts = cast('list[Any]', content)
            beside += [part for part in parts if isinstance(part, Mapping) and 'text' not in part]
    return beside
