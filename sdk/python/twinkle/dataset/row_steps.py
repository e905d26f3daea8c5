"""Operations of datasets on a batch of rows: map, filter, cast and encode."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from twinkle.data_format import IGNORE_INDEX
from twinkle.dataset.errors import DatasetError, InvalidExample
from twinkle.dataset.row_bounds import Row
from twinkle.preprocessor import FilterFunction, FormatReader, InvalidRow, MapFunction, Preprocessor
from twinkle.template import EncodedChat, ExampleTooLong, InvalidTrajectory, Template, TemplateError


def map_rows(rows: Sequence[Row], function: MapFunction, *, begin: int) -> list[Row]:
    """Return the rows that a function of columns creates from `rows`.

    Args:
        rows: the rows of a batch.
        function: a preprocessor or a function from columns to columns.
        begin: index of the first row in the dataset.

    Raises:
        InvalidRow: the function cannot use a row; the error names the row.
        DatasetError: the function returned columns of different lengths.
    """
    try:
        changed = function(Preprocessor.map_row_to_col(rows))
    except InvalidRow as error:
        raise error.at(begin + error.row_index) from error
    lengths = {name: len(values) for name, values in changed.items()}
    if len(set(lengths.values())) > 1:
        raise DatasetError(
            f'the preprocessor returned columns of different lengths: {lengths}; return one value per row in each'
        )
    return Preprocessor.map_col_to_row(changed)


def is_kept(row: Row, function: FilterFunction, *, index: int) -> bool:
    """Return whether a filter accepts row `index`.

    Raises:
        InvalidRow: the filter cannot use the row; the error names the row.
    """
    try:
        return bool(function(row))
    except InvalidRow as error:
        raise error.at(index) from error


def cast_row(row: Row, column: str, decode: Callable[[Any], Any], *, index: int) -> Row:
    """Return row `index` with the value of one column replaced by `decode(value)`.

    Raises:
        InvalidExample: the row does not have the column.
    """
    if column not in row:
        raise InvalidExample(index, column, 'is missing')
    return {**row, column: decode(row[column])}


def read_rows(reader: FormatReader, rows: Sequence[Row], *, begin: int) -> tuple[list[Row], list[int]]:
    """Return the chats of rows in a known format, and for each chat the index of its row in the dataset.

    Raises:
        InvalidRow: a row does not have the format; the error names the row.
    """
    chats: list[Row] = []
    indices: list[int] = []
    for index, row in enumerate(rows, start=begin):
        try:
            found = reader.read(row)
        except InvalidRow as error:
            raise error.at(index) from error
        chats += found
        indices += [index] * len(found)
    return chats, indices


def problems_of(template: Template, reader: FormatReader, rows: Sequence[Row], *, begin: int) -> list[str | None]:
    """Return for each row the reason why it would not be trained on, or None if all of its chats are usable."""
    problems: list[str | None] = []
    for index, row in enumerate(rows, start=begin):
        try:
            found = template.batch_check(read_rows(reader, [row], begin=index)[0])
        except InvalidRow as error:
            found = [f'{error.column} {error.problem}']
        problems.append(next((problem for problem in found if problem is not None), None))
    return problems


def encode_rows(
    template: Template, rows: Sequence[Row], *, indices: Sequence[int], is_prompt: bool
) -> list[EncodedChat]:
    """Encode rows together; if that fails, encode them one by one to find the invalid row.

    Args:
        template: converts chats to tokens.
        rows: the chats of a batch.
        indices: index of the row of each chat in the dataset.
        is_prompt: whether to end with the opening of an assistant turn and to omit the labels.

    Raises:
        InvalidExample: a row cannot be encoded; the error names the row and the field.
        TemplateError: the rows cannot be encoded together, although each can be encoded alone.
    """
    try:
        return template.encode_chats(rows, add_generation_prompt=is_prompt)
    except TemplateError:
        for index, row in zip(indices, rows, strict=True):
            _encode_alone(template, row, index, is_prompt=is_prompt)
        raise


def encode_batch(
    template: Template, reader: FormatReader, rows: Sequence[Row], *, begin: int
) -> tuple[list[Row], list[EncodedChat]]:
    """Return the chats of rows in a known format, and their encodings; `begin` is the index of the first row.

    Raises:
        InvalidRow, InvalidExample, TemplateError: as in `read_rows` and `encode_rows`.
    """
    chats, indices = read_rows(reader, rows, begin=begin)
    return chats, encode_rows(template, chats, indices=indices, is_prompt=reader.is_prompt)


class EncodeTally:
    """Counts the examples that encoding truncated, left out, or encoded without labels."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._chat_count = 0
        self._counts: dict[str, int] = dict.fromkeys(('left out', 'cut', 'unlabelled'), 0)
        self._reported: set[str] = set()

    def add(self, chats: Sequence[EncodedChat]) -> None:
        """Count the problems of some encoded chats."""
        limit = self._template.max_length
        self._chat_count += len(chats)
        for chat in chats:
            self._counts['left out'] += chat.token_count > limit and not chat.features
            self._counts['cut'] += chat.token_count > limit and bool(chat.features)
            self._counts['unlabelled'] += sum(_is_unlabelled(feature) for feature in chat.features)

    @property
    def counts(self) -> dict[str, int]:
        """Number of chats, and of examples with each kind of problem."""
        return {'chats': self._chat_count, **self._counts}

    def merge(self, counts: Mapping[str, int]) -> None:
        """Add the `counts` of another tally."""
        self._chat_count += counts['chats']
        for kind in self._counts:
            self._counts[kind] += counts[kind]

    def lines(self) -> list[str]:
        """Return one sentence for each kind of problem that occurred."""
        return [self._line(kind) for kind, count in self._counts.items() if count]

    def new_lines(self) -> list[str]:
        """Return one sentence for each kind of problem that no earlier call of this method reported."""
        kinds = [kind for kind, count in self._counts.items() if count and kind not in self._reported]
        self._reported.update(kinds)
        return [f'so far, {self._line(kind)}' for kind in kinds]

    def _line(self, kind: str) -> str:
        limit = self._template.max_length
        problems = {
            'left out': f'were left out: longer than max_length {limit}',
            'cut': f'were cut to max_length {limit} ({self._template.truncation_strategy})',
            'unlabelled': 'have no labels: nothing in them is trained on',
        }
        return f'{self._counts[kind]} of {self._chat_count} examples {problems[kind]}'


def _is_unlabelled(feature: Mapping[str, Any]) -> bool:
    return 'labels' in feature and bool((np.asarray(feature['labels']) == IGNORE_INDEX).all())


def _encode_alone(template: Template, row: Row, index: int, *, is_prompt: bool) -> None:
    try:
        template.encode_chats([row], add_generation_prompt=is_prompt)
    except InvalidTrajectory as error:
        raise InvalidExample(index, error.field, error.problem) from error
    except ExampleTooLong as error:
        problem = str(error).removeprefix('the example ')
        raise InvalidExample(index, '', problem) from error
    except TemplateError as error:
        raise InvalidExample(index, 'messages', f'were refused: {error}') from error
