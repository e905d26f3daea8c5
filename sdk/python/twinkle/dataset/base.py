"""Base class with the methods of every kind of dataset; subclasses decide how rows are stored."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Unpack

from twinkle.dataset.errors import DatasetError, NotReady
from twinkle.dataset.files import write_rows
from twinkle.dataset.hints import ExecutionOptions, check_options
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.passes import log_report
from twinkle.dataset.recording import RowRecorder
from twinkle.dataset.row_bounds import Row
from twinkle.infra import get_logger, remote_class
from twinkle.preprocessor import (
    DataFilter,
    FilterFunction,
    FormatReader,
    MapFunction,
    Preprocessor,
    build_filter,
    build_preprocessor,
)
from twinkle.template import Template, build_template

Decode = Callable[[Any], Any] | Literal[False]
"""Function that converts a column's values; False keeps the stored values."""
SaveMode = Literal['immediate', 'training']
"""When `save_as` writes rows: all of them now, or each row when it is first read."""
RowsT = TypeVar('RowsT', bound=Iterable[Any])


@remote_class()
class BaseDataset(ABC, Generic[RowsT]):
    """Training rows: a list in memory, rows computed on access, or a stream.

    A dataset starts with the rows of one `DatasetMeta`; more can be added and mixed in. If a method that changes rows
    raises an error, the rows are unchanged. While rows are being recorded, all of these methods except `add_dataset`
    raise `NotReady`.
    """

    def __init__(self, dataset_meta: DatasetMeta | None = None, *, template: Template | None = None) -> None:
        """Open the dataset.

        Args:
            dataset_meta: source of the first rows. Default: none; rows are then added with `add_dataset`.
            template: the same as `set_template` with an instance. Default: none.

        Raises:
            HubError: the dataset cannot be found or downloaded.
            DatasetError: a file, subset or split cannot be read.
        """
        self._parts: list[tuple[DatasetMeta, RowsT]] = []
        self._recorder: RowRecorder | None = None
        self.template = template
        """Converts chats to tokens; None until it is set."""
        self.is_encoded = False
        """Whether the rows are token features."""
        if dataset_meta is not None:
            self.add_dataset(dataset_meta)

    def add_dataset(self, dataset_meta: DatasetMeta) -> None:
        """Add the rows of another dataset; call `mix_dataset` afterwards to join them.

        Raises:
            NotReady: the rows are already encoded.
            HubError: the dataset cannot be found or downloaded.
            DatasetError: a file, subset or split cannot be read.
        """
        self._refuse_encoded('add_dataset')
        self._parts.append((dataset_meta, self._load(dataset_meta)))

    def mix_dataset(self, *, interleave: bool = True) -> None:
        """Join the added datasets into one.

        Args:
            interleave: whether to take rows in turn from all datasets with rows left, not concatenated. Default: True.

        Raises:
            NotReady: no dataset was added, or rows are being recorded.
        """
        self._refuse_recording()
        if not self._parts:
            raise NotReady('there are no datasets to mix; call add_dataset() first')
        mixed = self._mixed([rows for _, rows in self._parts], is_interleaved=interleave)
        self._parts = [(self._parts[0][0], mixed)]

    def set_template(self, template_func: 'str | type[Template] | Template', **kwargs: Any) -> None:
        """Set the template that converts chats to tokens.

        Args:
            template_func: a registered name, a class or an instance.
            kwargs: arguments of its constructor, including `model_id`; not allowed with an instance.

        Raises:
            UnknownTemplate: the name is not registered.
            HubError, TemplateError, ValueError: the template's constructor failed; see `Template`.
            TypeError: arguments are given with an instance, or the constructor does not accept them.
            PluginRefused: plugins are not allowed, or the plugin does not contain exactly one template.
            NotReady: the rows are already encoded.
            DatasetError: this kind of dataset does not support the template's options.
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
        **options: Unpack[ExecutionOptions],
    ) -> None:
        """Apply a preprocessor to the rows.

        Args:
            preprocess_func: a registered name, a class, an instance, or a function from columns to columns (mappings
                of a name to one value per row).
            dataset_meta: the dataset to change, required if several were added. Default: the only dataset.
            init_args: arguments of the constructor, for names and classes. Default: none.
            options: options of `datasets.Dataset.map`; see `ExecutionOptions`.

        Raises:
            PreprocessorError: the preprocessor is unknown, its arguments are wrong, or a row cannot be read.
            DatasetError: `dataset_meta` was not added, the function returned columns of different lengths, or
                `batched=False` was given, although functions always receive columns.
            NotReady: the rows are already encoded or are being recorded, there is no dataset, or there are several
                datasets and `dataset_meta` is not given.
            TypeError: an option is unknown.
        """
        self._check_options('map', options, is_batched=True)
        self._refuse_encoded('map')
        function = build_preprocessor(preprocess_func, init_args)
        self._replace(dataset_meta, lambda rows: self._mapped(rows, function, options))
        log_report(function)

    def filter(
        self,
        filter_func: 'str | type[DataFilter] | FilterFunction',
        dataset_meta: DatasetMeta | None = None,
        *,
        init_args: Mapping[str, Any] | None = None,
        **options: Unpack[ExecutionOptions],
    ) -> None:
        """Keep only the rows that a filter accepts.

        Args:
            filter_func: a registered name, a class, an instance, or a function from a row to a boolean.
            dataset_meta: the dataset to change, required if several were added. Default: the only dataset.
            init_args: arguments of the constructor, for names and classes. Default: none.
            options: options of `datasets.Dataset.filter`; see `ExecutionOptions`.

        Raises:
            PreprocessorError: the filter is unknown, its arguments are wrong, or a row cannot be read.
            DatasetError: `dataset_meta` was not added, or `batched=True` was given, although filters always receive
                one row.
            NotReady: there is no dataset, there are several datasets and `dataset_meta` is not given, or rows are being
                recorded.
            TypeError: an option is unknown.
        """
        self._check_options('filter', options, is_batched=False)
        function = build_filter(filter_func, init_args)
        self._replace(dataset_meta, lambda rows: self._filtered(rows, function, options))
        log_report(function)

    def cast_column(self, column: str, decode: Decode) -> None:
        """Convert the values of a column.

        Args:
            column: name of the column.
            decode: function from a stored value to the new value. False keeps stored values; True is not supported.

        Raises:
            DatasetError: a row does not have the column, or `decode` is neither False nor a function.
            NotReady: there is no dataset, several datasets are not mixed yet, or rows are being recorded.
        """
        if decode is not False and not callable(decode):
            raise DatasetError(f'decode must be False or a function that decodes a value, got {decode!r}')
        function: Callable[[Any], Any] = decode or (lambda value: value)
        self._replace(None, lambda rows: self._cast(rows, column, function))

    def encode(
        self,
        *,
        add_generation_prompt: bool = False,
        format: str | None = None,  # noqa: A002 - public argument name
        **options: Unpack[ExecutionOptions],
    ) -> list[str]:
        """Convert rows to token features; the other columns are kept.

        Rows are chats (`messages`), or have one of the formats in `ROW_FORMATS` of `twinkle.preprocessor`.

        Args:
            add_generation_prompt: whether to end with the opening of an assistant turn, without labels, for sampling.
                Default: False.
            format: name of the rows' format. Default: it is recognized by the columns of the first row.
            options: options of `datasets.Dataset.map`; see `ExecutionOptions`.

        Returns:
            The format of the rows unless they are chats, and warnings about examples that were cut, left out, or have
            no labels; they are also logged. Empty for datasets that encode rows when they are read, which only log
            them.

        Raises:
            NotReady: no template is set, the rows are already encoded or are being recorded, there is no dataset, or
                several datasets are not mixed yet.
            InvalidRow: the columns of a row fit no format or several formats, or the format differs from earlier rows.
            InvalidArguments: the format is unknown.
            InvalidExample: a row is not a valid chat, or is too long and must not be cut; see `Template.encode`.
            DatasetError: this kind of dataset does not support the template's options.
            TypeError: an option is unknown.
        """
        self._check_options('encode', options, is_batched=None)
        self._refuse_encoded('encode')
        report: list[str] = []
        template = self._template()
        self._refuse_template(template)
        reader = FormatReader(format, is_prompt=add_generation_prompt)
        self._replace(None, lambda rows: self._encoded(rows, template, report, reader, options))
        self.is_encoded = True
        for line in report:
            get_logger().warning('%s', line)
        return report

    def check(
        self,
        *,
        format: str | None = None,  # noqa: A002 - public argument name
        **options: Unpack[ExecutionOptions],
    ) -> list[str]:
        """Remove the rows that would not be trained on, and return the reasons.

        Args:
            format: see `encode`.
            options: options of `datasets.Dataset.map`; see `ExecutionOptions`.

        Returns:
            One `rows[i]: reason` per removed row; empty for datasets that check rows when they are read.

        Raises:
            NotReady: no template is set, the rows are already encoded or are being recorded, there is no dataset, or
                several datasets are not mixed yet.
            TypeError: an option is unknown.
        """
        self._check_options('check', options, is_batched=None)
        self._refuse_encoded('check')
        problems: list[str] = []
        template, reader = self._template(), FormatReader(format)
        self._replace(None, lambda rows: self._checked(rows, template, problems, reader, options))
        return problems

    def save_as(
        self,
        output_path: str | Path,
        format: str | None = None,  # noqa: A002 - public argument name
        batch_size: int = 1000,
        mode: SaveMode = 'immediate',
    ) -> None:
        """Write the rows to a file.

        Args:
            output_path: path of the file; missing folders are created.
            format: 'jsonl', 'parquet', 'csv' or 'arrow' (readable with `Dataset.from_file` of `datasets`). Default:
                the suffix of the path.
            batch_size: number of rows written together, at least 1. Default: 1000.
            mode: 'immediate' computes and writes all rows now. 'training' writes each row when it is first read, so
                the file contains the rows that were trained on; call `flush_save` to complete it. Default: 'immediate'.

        Raises:
            UnreadableFile: the format is unknown or cannot represent the rows.
            NotReady: there is no dataset, several datasets are not mixed yet, rows are already being recorded, or
                several ranks would record to the same file.
            ValueError: `batch_size` or `mode` is invalid.
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
        """Complete the file of `save_as(mode='training')` and stop recording.

        Raises:
            NotReady: no rows are being recorded.
            UnreadableFile: the format cannot represent the rows; they stay in a `.part` file in the same folder.
        """
        if self._recorder is None:
            raise NotReady("no rows are being recorded; call save_as(..., mode='training') first")
        recorder, self._recorder = self._recorder, None
        recorder.close()

    def __repr__(self) -> str:
        if len(self._parts) != 1:
            return f'{type(self).__name__}({len(self._parts)} datasets, not mixed)'
        ((meta, rows),) = self._parts
        facts = {**self._facts(rows), 'is_encoded': self.is_encoded}
        shown = ', '.join(f'{name}={value!r}' for name, value in facts.items())
        return f'{type(self).__name__}({meta.name!r}, {shown})'

    def _facts(self, rows: RowsT) -> Mapping[str, Any]:
        """Return what `repr` shows of the rows without processing them."""
        del rows
        return {}

    @abstractmethod
    def to_hf(self) -> Any:
        """Return the rows as a dataset of the Hugging Face library `datasets`.

        Raises:
            MissingLibrary: `datasets` is not installed.
            NotReady: there is no dataset, or several datasets are not mixed yet.
        """

    @abstractmethod
    def _load(self, meta: DatasetMeta) -> RowsT: ...

    @abstractmethod
    def _mixed(self, parts: Sequence[RowsT], *, is_interleaved: bool) -> RowsT: ...

    @abstractmethod
    def _mapped(self, rows: RowsT, function: MapFunction, options: ExecutionOptions) -> RowsT: ...

    @abstractmethod
    def _filtered(self, rows: RowsT, function: FilterFunction, options: ExecutionOptions) -> RowsT: ...

    @abstractmethod
    def _cast(self, rows: RowsT, column: str, decode: Callable[[Any], Any]) -> RowsT: ...

    @abstractmethod
    def _encoded(
        self, rows: RowsT, template: Template, report: list[str], reader: FormatReader, options: ExecutionOptions
    ) -> RowsT: ...

    @abstractmethod
    def _checked(
        self, rows: RowsT, template: Template, problems: list[str], reader: FormatReader, options: ExecutionOptions
    ) -> RowsT: ...

    @abstractmethod
    def _rows_to_save(self) -> Iterable[Row]: ...

    def _read(self, position: int, row: Row) -> Row:
        """Record a row if rows are being recorded, and return the row."""
        if self._recorder is not None:
            self._recorder.add(position, row)
        return row

    @property
    def _rows(self) -> RowsT:
        return self._parts[self._only_part()][1]

    def _only_part(self) -> int:
        if not self._parts:
            raise NotReady('the dataset is empty; call add_dataset() first')
        if len(self._parts) > 1:
            raise NotReady(f'there are {len(self._parts)} separate datasets; call mix_dataset() to join them')
        return 0

    def _replace(self, meta: DatasetMeta | None, change: Callable[[RowsT], RowsT]) -> None:
        self._refuse_recording()
        if meta is None and len(self._parts) > 1:
            raise NotReady('there are several datasets; give dataset_meta to choose one, or call mix_dataset() first')
        index = self._only_part() if meta is None else self._index_of(meta)
        self._parts[index] = (self._parts[index][0], change(self._parts[index][1]))

    def _index_of(self, meta: DatasetMeta) -> int:
        for index, (known, _) in enumerate(self._parts):
            if known is meta:
                return index
        raise DatasetError(f'{meta.name} is not part of this dataset; call add_dataset() with this object first')

    def _template(self) -> Template:
        if self.template is None:
            problem = "no template is set; call set_template('Template', model_id=...) first"
            raise NotReady(problem, needs='set_template')
        return self.template

    def _refuse_encoded(self, step: str) -> None:
        if self.is_encoded:
            raise NotReady(f'the rows are already encoded; call {step}() before encode()')

    def _refuse_recording(self) -> None:
        if self._recorder is not None:
            raise NotReady('rows are being recorded; call flush_save() first')

    def _check_options(self, verb: str, options: ExecutionOptions, *, is_batched: bool | None) -> None:
        """Refuse invalid options of a method; subclasses also log those without an effect."""
        check_options(verb, options, is_batched=is_batched)

    def _refuse_template(self, template: Template) -> None:
        """Raise `DatasetError` if this kind of dataset does not support the template; the default accepts all."""
