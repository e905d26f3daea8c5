"""A dataset whose rows are worked out when they are read."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from twinkle.dataset.dataset import Dataset
from twinkle.dataset.errors import DatasetError, InvalidExample
from twinkle.dataset.files import Row
from twinkle.dataset.mixing import Place, mixed_order
from twinkle.dataset.passes import remembers_rows
from twinkle.dataset.row_steps import EncodeTally, cast_row, encode_rows, is_kept, map_rows
from twinkle.infra import get_logger
from twinkle.preprocessor import FilterFunction, MapFunction
from twinkle.template import Template

RowStep = Callable[[Row, int], Row]
"""A row and its index to another row."""


class LazyDataset(Dataset):
    """Rows to train on, of which only the raw ones are kept.

    `map`, `cast_column`, `mix_dataset`, `encode` and `check` return at once; what they ask for is done to a row
    each time it is read, so each must make exactly one row of one, and what is wrong with a row is raised by
    reading it (`DataLoader` puts another in its place and says so). `filter` reads all rows at once.
    """

    def _mixed(self, parts: Sequence[Sequence[Row]], *, is_interleaved: bool) -> Sequence[Row]:
        return _Picked(parts, mixed_order([len(rows) for rows in parts], is_interleaved=is_interleaved))

    def _mapped(self, rows: Sequence[Row], function: MapFunction) -> Sequence[Row]:
        if remembers_rows(function):
            name = type(function).__name__
            raise DatasetError(
                f'{name} looks at all rows in turn, which a LazyDataset does not; use Dataset, or filter()'
            )

        def step(row: Row, index: int) -> Row:
            mapped = map_rows([row], function, begin=index)
            if len(mapped) != 1:
                raise InvalidExample(
                    index, '', f'became {len(mapped)} rows; a LazyDataset maps one to one, use Dataset or filter() here'
                )
            return mapped[0]

        return _Changed(rows, step)

    def _filtered(self, rows: Sequence[Row], function: FilterFunction) -> Sequence[Row]:
        return _Picked([rows], [(0, index) for index, row in enumerate(rows) if is_kept(row, function, index=index)])

    def _cast(self, rows: Sequence[Row], column: str, decode: Callable[[Any], Any]) -> Sequence[Row]:
        return _Changed(rows, lambda row, index: cast_row(row, column, decode, index=index))

    def _encoded(self, rows: Sequence[Row], template: Template, report: list[str], *, is_prompt: bool) -> Sequence[Row]:
        return _Changed(rows, _EncodeStep(template, is_prompt=is_prompt))

    def _checked(self, rows: Sequence[Row], template: Template, problems: list[str]) -> Sequence[Row]:
        def step(row: Row, index: int) -> Row:
            problem = template.check(row)
            if problem is not None:
                raise InvalidExample(index, '', f'would not be trained on: {problem}')
            return row

        return _Changed(rows, step)

    def _refuse_template(self, template: Template) -> None:
        if template.truncation_strategy == 'split':
            raise DatasetError(
                "truncation_strategy 'split' makes several rows of one, which a LazyDataset cannot; "
                "use Dataset, or 'raise', 'left', 'right' or 'delete'"
            )


class _EncodeStep:
    """Encodes a row, and logs the first that was cut and the first that trains on nothing."""

    def __init__(self, template: Template, *, is_prompt: bool) -> None:
        self._template = template
        self._is_prompt = is_prompt
        self._tally = EncodeTally(template)

    def __call__(self, row: Row, index: int) -> Row:
        chat = encode_rows(self._template, [row], begin=index, is_prompt=self._is_prompt)[0]
        if not chat.features:
            problem = (
                f'has {chat.token_count} tokens, more than max_length {self._template.max_length}, and is left out'
            )
            raise InvalidExample(index, '', problem)
        self._tally.add([chat])
        for line in self._tally.news():
            get_logger().warning('rows[%d] and perhaps others: %s', index, line)
        return {**row, **chat.features[0]}


class _LazyRows(Sequence[Row]):
    """Rows by index, worked out when they are asked for."""

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> 'Row | Sequence[Row]':
        if isinstance(index, slice):
            return [self._at(place) for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f'row {index} of {len(self)}')
        return self._at(index % len(self))

    def __iter__(self) -> Iterator[Row]:
        return (self._at(index) for index in range(len(self)))

    @abstractmethod
    def _at(self, index: int) -> Row:
        """Return the row at `index`, which is one that is there."""


class _Changed(_LazyRows):
    """Rows with a step done to each."""

    def __init__(self, rows: Sequence[Row], step: RowStep) -> None:
        self._rows = rows
        self._step = step

    def __len__(self) -> int:
        return len(self._rows)

    def _at(self, index: int) -> Row:
        return self._step(self._rows[index], index)


class _Picked(_LazyRows):
    """Rows taken from several datasets."""

    def __init__(self, parts: Sequence[Sequence[Row]], places: Sequence[Place]) -> None:
        self._parts = parts
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def _at(self, index: int) -> Row:
        part, row = self._places[index]
        return self._parts[part][row]
