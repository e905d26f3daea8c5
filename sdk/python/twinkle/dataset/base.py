"""The verbs that every kind of dataset has; how rows are held is up to the kinds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Unpack

from twinkle.dataset.errors import DatasetError, NotReady
from twinkle.dataset.files import Row, write_rows
from twinkle.dataset.hints import ExecutionHints, check_hints
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.passes import log_report
from twinkle.dataset.recording import RowRecorder
from twinkle.infra import get_logger, remote_class
from twinkle.preprocessor import (
    DataFilter,
    FilterFunction,
    MapFunction,
    Preprocessor,
    build_filter,
    build_preprocessor,
)
from twinkle.template import Template, build_template

Decode = Callable[[Any], Any] | Literal[False]
"""What a column's values become; False: they stay as they are stored."""
SaveMode = Literal['immediate', 'training']
RowsT = TypeVar('RowsT', bound=Iterable[Any])


@remote_class()
class BaseDataset(ABC, Generic[RowsT]):
    """Rows to train on, as a list, worked out one by one, or as a stream.

    A dataset begins with the rows of one `DatasetMeta`; more can be added and mixed in. Every
    method that changes rows refuses before anything has changed.
    """

    def __init__(self, dataset_meta: DatasetMeta | None = None, *, template: Template | None = None) -> None:
        """Open the rows.

        Args:
            dataset_meta: the first rows. Unset: none, `add_dataset` brings them.
            template: as `set_template`.

        Raises:
            HubError: the dataset cannot be had.
            DatasetError: a file, subset or split cannot be read.
        """
        self._parts: list[tuple[DatasetMeta, RowsT]] = []
        self._recorder: RowRecorder | None = None
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
        self._parts.append((dataset_meta, self._load(dataset_meta)))

    def mix_dataset(self, *, interleave: bool = True) -> None:
        """Join the added datasets into one.

        Args:
            interleave: True: rows alternate between them, and what is left of the longer ones
                follows. False: one dataset after the other.

        Raises:
            NotReady: nothing was added.
        """
        self._refuse_recording()
        if not self._parts:
            raise NotReady('there is nothing to mix; add_dataset() first')
        mixed = self._mixed([rows for _, rows in self._parts], is_interleaved=interleave)
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
            DatasetError: this kind of dataset cannot do what the template asks for.
        """
        self._refuse_encoded('set_template')
        template = build_template(template_func, **kwargs)
        self._refuse_template(template)
        self.template = template

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
            hints: options of other libraries' `map`; those without effect here are logged.

        Raises:
            PreprocessorError: it is unknown, its arguments are wrong, or a row cannot be read.
            DatasetError: `batched=False`, which a function of columns is not.
            NotReady: the rows are encoded, or there are several datasets and none is named.
        """
        check_hints('map', hints, is_batched=True)
        self._refuse_encoded('map')
        function = build_preprocessor(preprocess_func, init_args)
        self._replace(dataset_meta, lambda rows: self._mapped(rows, function))
        log_report(function)

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
        check_hints('filter', hints, is_batched=False)
        function = build_filter(filter_func, init_args)
        self._replace(dataset_meta, lambda rows: self._filtered(rows, function))
        log_report(function)

    def cast_column(self, column: str, decode: Decode) -> None:
        """Replace a column's values.

        Args:
            decode: what a value becomes. False: it stays as it is stored, such as the bytes of an image;
                there is no True, because nothing is decoded unless a function says how.

        Raises:
            DatasetError: a row does not have the column, or `decode` is True.
        """
        if decode is not False and not callable(decode):
            raise DatasetError('decode must be False or a function that decodes a value')
        function: Callable[[Any], Any] = decode or _as_stored
        self._replace(None, lambda rows: self._cast(rows, column, function))

    def encode(self, *, add_generation_prompt: bool = False, **hints: Unpack[ExecutionHints]) -> list[str]:
        """Turn chats into token features, other columns staying beside them.

        Args:
            add_generation_prompt: end with the opening of an assistant turn and give no labels (for sampling).

        Returns:
            What the caller should know, and what was logged: rows cut, left out, or training on nothing.
            Empty where rows are encoded as they are read; it is logged then.

        Raises:
            NotReady: there is no template, or the rows are encoded already.
            InvalidExample: a row is no chat, or too long under `truncation_strategy='raise'`.
        """
        check_hints('encode', hints, is_batched=None)
        self._refuse_encoded('encode')
        report: list[str] = []
        template = self._template()
        self._refuse_template(template)
        self._replace(None, lambda rows: self._encoded(rows, template, report, is_prompt=add_generation_prompt))
        self.is_encoded = True
        for line in report:
            get_logger().warning('%s', line)
        return report

    def check(self, **hints: Unpack[ExecutionHints]) -> list[str]:
        """Leave out rows that would not be trained on and return why, `rows[i]: reason` each.

        Raises:
            NotReady: there is no template, or the rows are encoded already.
        """
        check_hints('check', hints, is_batched=None)
        self._refuse_encoded('check')
        problems: list[str] = []
        template = self._template()
        self._replace(None, lambda rows: self._checked(rows, template, problems))
        return problems

    def save_as(
        self,
        output_path: str | Path,
        format: str | None = None,  # noqa: A002 - the name users type
        batch_size: int = 1000,
        mode: SaveMode = 'immediate',
    ) -> None:
        """Write the rows to a file.

        Args:
            format: 'jsonl', 'parquet', 'csv' or 'arrow' (for `Dataset.from_file` of `datasets`). Unset: the suffix.
            batch_size: rows written together, at least 1.
            mode: 'immediate' works all rows out and writes them now. 'training' writes each row when it is
                first read, so the file holds what was trained on; `flush_save` completes it.

        Raises:
            UnreadableFile: the format is unknown, or cannot hold these rows.
            NotReady: rows are being recorded already, or several ranks would record into one file.
            ValueError: `batch_size` or `mode` is out of range.
        """
        if batch_size < 1:
            raise ValueError(f'batch_size must be at least 1, got {batch_size}')
        self._refuse_recording()
        self._only_part()
        if mode == 'immediate':
            write_rows(Path(output_path), self._rows_to_save(), format, batch_rows=batch_size)
        elif mode == 'training':
            self._recorder = RowRecorder(Path(output_path), format, batch_rows=batch_size)
        else:
            raise ValueError(f"mode must be 'immediate' or 'training', got {mode!r}")

    def flush_save(self) -> None:
        """Complete the file of `save_as(mode='training')`; what is read from now on is not recorded.

        Raises:
            NotReady: nothing is being recorded.
            UnreadableFile: the format cannot hold these rows; they stay in a `.part` file beside it.
        """
        if self._recorder is None:
            raise NotReady("nothing is being recorded; save_as(..., mode='training') first")
        recorder, self._recorder = self._recorder, None
        recorder.close()

    @abstractmethod
    def to_hf(self) -> Any:
        """Return the rows as an object of Hugging Face `datasets`, which has to be installed.

        Raises:
            MissingLibrary: it is not.
        """

    @abstractmethod
    def _load(self, meta: DatasetMeta) -> RowsT: ...

    @abstractmethod
    def _mixed(self, parts: Sequence[RowsT], *, is_interleaved: bool) -> RowsT: ...

    @abstractmethod
    def _mapped(self, rows: RowsT, function: MapFunction) -> RowsT: ...

    @abstractmethod
    def _filtered(self, rows: RowsT, function: FilterFunction) -> RowsT: ...

    @abstractmethod
    def _cast(self, rows: RowsT, column: str, decode: Callable[[Any], Any]) -> RowsT: ...

    @abstractmethod
    def _encoded(self, rows: RowsT, template: Template, report: list[str], *, is_prompt: bool) -> RowsT: ...

    @abstractmethod
    def _checked(self, rows: RowsT, template: Template, problems: list[str]) -> RowsT: ...

    @abstractmethod
    def _rows_to_save(self) -> Iterable[Row]: ...

    def _read(self, position: int, row: Row) -> Row:
        """Record a row that is given out, where rows are recorded."""
        if self._recorder is not None:
            self._recorder.add(position, row)
        return row

    @property
    def _rows(self) -> RowsT:
        return self._parts[self._only_part()][1]

    def _only_part(self) -> int:
        if not self._parts:
            raise NotReady('the dataset is empty; add_dataset() first')
        if len(self._parts) > 1:
            raise NotReady(f'there are {len(self._parts)} datasets here; call mix_dataset() to make them one')
        return 0

    def _replace(self, meta: DatasetMeta | None, change: Callable[[RowsT], RowsT]) -> None:
        self._refuse_recording()
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

    def _refuse_recording(self) -> None:
        if self._recorder is not None:
            raise NotReady('rows are being recorded; call flush_save() first')

    def _refuse_template(self, template: Template) -> None:
        """Refuse a template that this kind of dataset cannot follow."""


def _as_stored(value: Any) -> Any:
    return value
