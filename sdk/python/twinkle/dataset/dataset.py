"""The dataset: rows in memory that are mapped, filtered, encoded and read by index."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from twinkle.data_format import IGNORE_INDEX
from twinkle.dataset.errors import DatasetError, InvalidExample, NotReady
from twinkle.dataset.files import Row, write_rows
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.sources import load_rows
from twinkle.infra import get_logger
from twinkle.preprocessor import (
    DataFilter,
    FilterFunction,
    InvalidRow,
    MapFunction,
    Preprocessor,
    build_filter,
    build_preprocessor,
)
from twinkle.template import EncodedChat, ExampleTooLong, InvalidTrajectory, Template, TemplateError, build_template

_BATCH_ROWS = 1000
"""Rows a preprocessor sees and a tokenizer encodes together."""


class ExecutionHints(TypedDict, total=False):
    """Options of other dataset libraries that mean nothing here: nothing is cached, all work is batched."""

    batched: bool
    load_from_cache_file: bool
    num_proc: int | None
    desc: str | None


class Dataset:
    """Rows to train on.

    A dataset begins with the rows of one `DatasetMeta`; more can be added and mixed in. Every
    method that changes rows checks all of them first: it changes all or, when it raises, none.
    """

    def __init__(self, dataset_meta: DatasetMeta | None = None, *, template: Template | None = None) -> None:
        """Load the rows.

        Args:
            dataset_meta: the first rows. Unset: none, `add_dataset` brings them.
            template: as `set_template`.

        Raises:
            HubError: the dataset cannot be had.
            DatasetError: a file, subset or split cannot be read.
        """
        self._parts: list[tuple[DatasetMeta, list[Row]]] = []
        self.template = template
        """How chats become tokens; None until set."""
        self.is_encoded = False
        """Whether rows are token features."""
        if dataset_meta is not None:
            self.add_dataset(dataset_meta)

    def add_dataset(self, dataset_meta: DatasetMeta) -> None:
        """Add another dataset's rows; `mix_dataset` joins them to the others.

        Raises:
            NotReady: the rows here are encoded already.
        """
        self._refuse_encoded('add_dataset')
        self._parts.append((dataset_meta, load_rows(dataset_meta)))

    def mix_dataset(self, *, interleave: bool = True) -> None:
        """Join the added datasets into one.

        Args:
            interleave: True: rows alternate between them, and what is left of the longer ones
                follows. False: one dataset after the other.
        """
        if not self._parts:
            raise NotReady('there is nothing to mix; add_dataset() first')
        parts = [rows for _, rows in self._parts]
        if interleave:
            rounds = zip_longest(*parts)
            mixed = [row for rows in rounds for row in rows if row is not None]
        else:
            mixed = [row for rows in parts for row in rows]
        self._parts = [(self._parts[0][0], mixed)]

    def set_template(self, template_func: 'str | type[Template] | Template', **kwargs: Any) -> None:
        """Choose how chats become tokens.

        Args:
            template_func: a registered name, a class or an instance.
            kwargs: of its constructor, `model_id` among them.

        Raises:
            UnknownTemplate: the name is not registered.
            HubError: the model's tokenizer cannot be had.
            NotReady: the rows are encoded already.
        """
        self._refuse_encoded('set_template')
        self.template = build_template(template_func, **kwargs)

    def map(
        self,
        preprocess_func: 'str | type[Preprocessor] | MapFunction',
        dataset_meta: DatasetMeta | None = None,
        *,
        init_args: Mapping[str, Any] | None = None,
        **hints: Unpack[ExecutionHints],
    ) -> None:
        """Rewrite rows.

        Args:
            preprocess_func: a registered name, a class, an instance, or a function of columns.
            dataset_meta: which of several added datasets. Unset: the only one.
            init_args: arguments of its constructor, for names and classes.

        Raises:
            PreprocessorError: it is unknown, its arguments are wrong, or a row cannot be read.
            NotReady: the rows are encoded, or there are several datasets and none is named.
        """
        self._check_hints(hints)
        self._refuse_encoded('map')
        function = build_preprocessor(preprocess_func, init_args)
        self._replace(dataset_meta, lambda rows: _mapped(rows, function))

    def filter(
        self,
        filter_func: 'str | type[DataFilter] | FilterFunction',
        dataset_meta: DatasetMeta | None = None,
        *,
        init_args: Mapping[str, Any] | None = None,
        **hints: Unpack[ExecutionHints],
    ) -> None:
        """Keep the rows a filter accepts; arguments as of `map`.

        Raises:
            PreprocessorError: it is unknown, its arguments are wrong, or a row cannot be read.
            NotReady: there are several datasets and none is named.
        """
        self._check_hints(hints)
        function = build_filter(filter_func, init_args)
        self._replace(dataset_meta, lambda rows: _filtered(rows, function))

    def cast_column(self, column: str, decode: Callable[[Any], Any]) -> None:
        """Replace a column's values by `decode(value)`.

        Raises:
            DatasetError: a row does not have the column.
        """
        missing = [index for index, row in enumerate(self._rows) if column not in row]
        if missing:
            raise InvalidExample(missing[0], column, 'is missing')
        self._set_rows([{**row, column: decode(row[column])} for row in self._rows])

    def encode(self, *, add_generation_prompt: bool = False, **hints: Unpack[ExecutionHints]) -> list[str]:
        """Turn chats into token features, other columns staying beside them.

        Args:
            add_generation_prompt: end with the opening of an assistant turn and give no labels (for sampling).

        Returns:
            What the caller should know, and what was logged: rows cut, left out, or training on nothing.

        Raises:
            NotReady: there is no template, or the rows are encoded already.
            InvalidExample: a row is no chat, or too long under `truncation_strategy='raise'`.
        """
        self._check_hints(hints)
        self._refuse_encoded('encode')
        template = self._template()
        encoded: list[Row] = []
        chats: list[EncodedChat] = []
        for begin in range(0, len(self._rows), _BATCH_ROWS):
            batch = self._rows[begin : begin + _BATCH_ROWS]
            chats += _encoded(template, batch, begin, add_generation_prompt=add_generation_prompt)
            for row, chat in zip(batch, chats[begin:], strict=True):
                encoded += [{**row, **feature} for feature in chat.features]
        self._set_rows(encoded)
        self.is_encoded = True
        report = _report(template, chats)
        for line in report:
            get_logger().warning('%s', line)
        return report

    def check(self, **hints: Unpack[ExecutionHints]) -> list[str]:
        """Leave out rows that would not be trained on and return why, `rows[i]: reason` each.

        Raises:
            NotReady: there is no template, or the rows are encoded already.
        """
        self._check_hints(hints)
        self._refuse_encoded('check')
        problems = self._template().batch_check(self._rows)
        self._set_rows([row for row, problem in zip(self._rows, problems, strict=True) if problem is None])
        return [f'rows[{index}]: {problem}' for index, problem in enumerate(problems) if problem is not None]

    def save_as(self, output_path: str | Path, format: str | None = None) -> None:  # noqa: A002 - the name users type
        """Write the rows to a file.

        Args:
            format: 'jsonl', 'parquet' or 'csv'. Unset: what the suffix says.

        Raises:
            UnreadableFile: the format is unknown, or cannot hold these rows.
        """
        write_rows(Path(output_path), self._rows, format)

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in order of appearance."""
        return list({name: None for row in self._rows for name in row})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @property
    def _rows(self) -> list[Row]:
        return self._parts[self._only_part()][1]

    def _set_rows(self, rows: list[Row]) -> None:
        index = self._only_part()
        self._parts[index] = (self._parts[index][0], rows)

    def _only_part(self) -> int:
        if not self._parts:
            raise NotReady('the dataset is empty; add_dataset() first')
        if len(self._parts) > 1:
            raise NotReady(f'there are {len(self._parts)} datasets here; call mix_dataset() to make them one')
        return 0

    def _replace(self, meta: DatasetMeta | None, change: Callable[[list[Row]], list[Row]]) -> None:
        if meta is None and len(self._parts) > 1:
            raise NotReady('there are several datasets here; say which by dataset_meta, or call mix_dataset() first')
        index = self._only_part() if meta is None else self._index_of(meta)
        self._parts[index] = (self._parts[index][0], change(self._parts[index][1]))

    def _index_of(self, meta: DatasetMeta) -> int:
        for index, (known, _) in enumerate(self._parts):
            if known is meta:
                return index
        raise DatasetError(f'{meta.name} was not added to this dataset')

    def _template(self) -> Template:
        if self.template is None:
            raise NotReady(
                "there is no template; call set_template('Template', model_id=...) first", needs='set_template'
            )
        return self.template

    def _refuse_encoded(self, step: str) -> None:
        if self.is_encoded:
            raise NotReady(f'the rows are encoded already; call {step}() before encode()')

    @staticmethod
    def _check_hints(hints: Mapping[str, Any]) -> None:
        unknown = sorted(set(hints) - set(ExecutionHints.__annotations__))
        if unknown:
            raise TypeError(f'unknown arguments {unknown}')


def _mapped(rows: Sequence[Row], function: MapFunction) -> list[Row]:
    mapped: list[Row] = []
    for begin in range(0, len(rows), _BATCH_ROWS):
        columns = Preprocessor.map_row_to_col(rows[begin : begin + _BATCH_ROWS])
        try:
            changed = function(columns)
        except InvalidRow as error:
            raise error.at(begin + error.row_index) from error
        lengths = {name: len(values) for name, values in changed.items()}
        if len(set(lengths.values())) > 1:
            raise DatasetError(f'the preprocessor returned columns of different lengths: {lengths}')
        mapped += Preprocessor.map_col_to_row(changed)
    return mapped


def _filtered(rows: Sequence[Row], function: FilterFunction) -> list[Row]:
    kept: list[Row] = []
    for index, row in enumerate(rows):
        try:
            if function(row):
                kept.append(row)
        except InvalidRow as error:
            raise error.at(index) from error
    return kept


def _encoded(template: Template, batch: Sequence[Row], begin: int, *, add_generation_prompt: bool) -> list[EncodedChat]:
    """Encode a batch together; only when something is wrong, row by row, to name it."""
    try:
        return template.encode_chats(batch, add_generation_prompt=add_generation_prompt)
    except TemplateError:
        for index, row in enumerate(batch, start=begin):
            _encode_alone(template, row, index, add_generation_prompt=add_generation_prompt)
        raise


def _encode_alone(template: Template, row: Row, index: int, *, add_generation_prompt: bool) -> None:
    try:
        template.encode_chats([row], add_generation_prompt=add_generation_prompt)
    except InvalidTrajectory as error:
        raise InvalidExample(index, error.field, error.problem) from error
    except ExampleTooLong as error:
        problem = str(error).removeprefix('the example ')
        raise InvalidExample(index, '', problem) from error
    except TemplateError as error:
        raise InvalidExample(index, 'messages', f'were refused: {error}') from error


def _report(template: Template, chats: Sequence[EncodedChat]) -> list[str]:
    long = [chat for chat in chats if chat.token_count > template.max_length]
    left_out = sum(not chat.features for chat in long)
    unlabelled = sum(
        'labels' in feature and bool((np.asarray(feature['labels']) == IGNORE_INDEX).all())
        for chat in chats
        for feature in chat.features
    )
    counts = {
        f'were left out: longer than max_length {template.max_length}': left_out,
        f'were cut to max_length {template.max_length} ({template.truncation_strategy})': len(long) - left_out,
        'train on nothing: no label in them counts': unlabelled,
    }
    return [f'{count} of {len(chats)} examples {what}' for what, count in counts.items() if count]
