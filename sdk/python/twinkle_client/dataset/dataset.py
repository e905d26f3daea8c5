"""Datasets of the data service, which transforms, tokenizes and packs their rows."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from twinkle.api.data.v1 import dataset_pb2, dataset_service_pb2
from twinkle.api.data.v1.dataset_service_pb2_grpc import DatasetServiceStub
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.convert.config import component_name, struct
from twinkle_client.dataset.arguments import check_hints, component_of, row_format
from twinkle_client.dataset.peeking import PeekedRow, peek_rows, rows_of
from twinkle_client.dataset.saving import save_dataset
from twinkle_client.dataset.source import DatasetMeta, MetaLike, dataset_source
from twinkle_client.rpc import LoopThread, new_id, remote_method

_log = logging.getLogger('twinkle_client')
_TRUNCATIONS: dict[str, dataset_pb2.TruncationStrategy.ValueType] = {
    'raise': dataset_pb2.TRUNCATION_STRATEGY_RAISE,
    'left': dataset_pb2.TRUNCATION_STRATEGY_LEFT,
    'right': dataset_pb2.TRUNCATION_STRATEGY_RIGHT,
    'split': dataset_pb2.TRUNCATION_STRATEGY_SPLIT,
    'delete': dataset_pb2.TRUNCATION_STRATEGY_DELETE,
}


class Dataset:
    """A dataset on the server. The first method that needs the dataset creates it; `add_dataset` only records a source.

    Each method returns when the server has applied the change. The call that creates the dataset also raises a
    NotFoundError if the hub has no such dataset, and a QuotaError if the tenant has too many datasets or bytes. Methods
    raise a ValueError if no source was added, or if several sources were added and neither mixed nor selected.

    Args:
        dataset_meta: Source of the dataset; a string is its id.
        client: Unset: the client initialized last.

    Raises:
        RuntimeError: There is no client.
    """

    is_streamed = False
    """Whether the data service stores no rows, and reads them from a hub for each loader."""

    def __init__(self, dataset_meta: MetaLike | str | None = None, *, client: TwinkleClient | None = None) -> None:
        self._client = current_client(client)
        self._connection = self._client.connection
        self._stub = DatasetServiceStub(self._connection.channel)
        self._parts: list[_Part] = []
        if dataset_meta is not None:
            self.add_dataset(dataset_meta)
        self._creation_lock = asyncio.Lock()
        self._is_prompt = False
        self._model_id = ''

    @property
    def client(self) -> TwinkleClient:
        """Client of the dataset."""
        return self._client

    @property
    def loop_thread(self) -> LoopThread:
        """Event loop that runs the methods."""
        return self._connection.loop_thread

    @property
    def is_prompt_only(self) -> bool:
        """Whether the dataset was encoded for sampling, with `add_generation_prompt`."""
        return self._is_prompt

    def add_dataset(self, dataset_meta: MetaLike | str) -> None:
        """Add another dataset, to be combined with the others by `mix_dataset`.

        Args:
            dataset_meta: Source of the dataset; a string is its id.
        """
        self._parts.append(_Part(DatasetMeta(dataset_meta) if isinstance(dataset_meta, str) else dataset_meta))

    @remote_method
    async def mix_dataset(self, *, interleave: bool = True) -> None:
        """Combine the added datasets into one, and delete the added datasets on the server.

        Args:
            interleave: Alternate between the datasets, and append the rest of longer datasets. False: concatenate.

        Raises:
            ValueError: No dataset was added.
            UsageError: Only some of the datasets are encoded or packed, their templates differ, a dataset is lazy, more
                than four streamed datasets alternate, or a streamed dataset has steps other than `map` and `filter`.
        """
        if not self._parts:
            raise ValueError('there is no dataset to mix; call add_dataset() first')
        # Only the mixture can be lazy, not its parts.
        ids = [(await self._created(part, is_lazy=False)).dataset_id for part in self._parts]
        mixture = dataset_pb2.MixtureSource(dataset_ids=ids, is_interleaved=interleave)
        state = await self._create(dataset_pb2.DatasetSource(mixture=mixture), is_lazy=isinstance(self, LazyDataset))
        self._parts = [_Part(self._parts[0].meta, state)]
        for part_id in ids:
            await self._delete(part_id)

    @remote_method
    async def save_as(self, output_path: str | Path, format: str | None = None) -> None:  # noqa: A002 - public name
        """Write the rows to a local file atomically.

        Args:
            output_path: Path of the file.
            format: 'jsonl', 'parquet' or 'csv'. Unset: derived from the suffix.

        Raises:
            ValueError: The format is unknown.
            UsageError: The format cannot represent the rows, or the dataset is lazy.
            OSError: The file cannot be written, or a chunk was damaged during the transfer.
        """
        dataset_id = (await self._created()).dataset_id
        await save_dataset(self._connection, dataset_id, Path(output_path), file_format=format)

    @remote_method
    async def describe(self) -> dataset_pb2.Dataset:
        """Return the dataset's record: rows, columns, tokens, warnings."""
        return await self._created()

    @remote_method
    async def peek(self, begin_row: int = 0, row_count: int = 20) -> Sequence[PeekedRow]:
        """Return some rows as a loader would read them, with the steps of a lazy dataset applied.

        Args:
            begin_row: Index of the first row.
            row_count: Maximum number of rows, at most 100. Fewer rows are returned if the rows exceed 2 MiB.

        Raises:
            TypeError: A number is not an integer.
            UsageError: A number is negative.
            QuotaError: A row takes too much memory.
        """
        dataset_id = (await self._created()).dataset_id
        return await peek_rows(self._connection, dataset_id, begin_row=begin_row, row_count=row_count)

    @remote_method
    async def set_template(
        self,
        template_func: Any = 'Template',
        *,
        model_id: str,
        max_length: int = 8192,
        truncation_strategy: str = 'raise',
        default_system: str | None = None,
        enable_thinking: bool = True,
    ) -> None:
        """Set the template that converts chats to tokens.

        Args:
            template_func: Name of a template; `TwinkleClient.get_server_info` lists the names.
            model_id: Model whose tokenizer and chat template are used.
            max_length: Maximum number of tokens per example.
            truncation_strategy: 'raise', 'left', 'right', 'split' or 'delete'.
            default_system: System message for chats without a system message.
            enable_thinking: Whether the model may think before it answers.

        Raises:
            ValueError: The strategy is unknown.
            NotFoundError: The model does not exist.
            UsageError: The server refused the template; the message names the field.
            StateError: The rows are already encoded, or a loader of the dataset is open.
        """
        if truncation_strategy not in _TRUNCATIONS:
            raise ValueError(f'truncation_strategy must be one of {sorted(_TRUNCATIONS)}, got {truncation_strategy!r}')
        self._model_id = model_id
        template = dataset_pb2.TemplateConfig(
            name=component_name(template_func),
            base_model=model_id,
            max_length=max_length,
            truncation_strategy=_TRUNCATIONS[truncation_strategy],
            default_system=default_system,
            is_thinking_enabled=enable_thinking,
        )
        await self._apply(dataset_pb2.DatasetStep(set_template=template))

    @remote_method
    async def map(
        self,
        preprocess_func: Any,
        dataset_meta: MetaLike | None = None,
        *,
        init_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Transform the rows with a preprocessor.

        Args:
            preprocess_func: Name, class or instance of a preprocessor that the server has.
            dataset_meta: The added dataset to transform. Unset: the only dataset.
            init_args: Constructor arguments, for a name or class.
            options: `batched`, `num_proc` and other options of the library's `map`; options without effect are
                logged.

        Raises:
            TypeError: The constructor arguments cannot be derived from the instance, or an option is unknown.
            UsageError: The server refused the step; the message names the row and the field.
            StateError: The rows are already encoded, or a loader of the dataset is open.
        """
        check_hints(options)
        name, arguments = component_of(preprocess_func, init_args)
        step = dataset_pb2.MapStep(preprocessor=name, init_args=struct(arguments, field=name))
        await self._apply(dataset_pb2.DatasetStep(map=step), meta=dataset_meta)

    @remote_method
    async def filter(
        self,
        filter_func: Any,
        dataset_meta: MetaLike | None = None,
        *,
        init_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Keep the rows that a filter accepts; the arguments are the same as for `map`."""
        check_hints(options)
        name, arguments = component_of(filter_func, init_args)
        step = dataset_pb2.FilterStep(filter=name, init_args=struct(arguments, field=name))
        await self._apply(dataset_pb2.DatasetStep(filter=step), meta=dataset_meta)

    @remote_method
    async def encode(
        self,
        *,
        add_generation_prompt: bool = False,
        format: str | None = None,  # noqa: A002 - public name
        **options: Any,
    ) -> None:
        """Convert rows to tokens. Rows are chats, or have another format that docs/datasets.md lists.

        Args:
            add_generation_prompt: Append the start of an assistant turn, without labels, for sampling.
            format: Name of the rows' format, such as 'prompt_completion'. Unset: the server recognizes the format by
                the columns, and names it in a warning.
            options: See `map`.

        Raises:
            StateError: No template is set, the rows are already encoded, or a loader of the dataset is open.
            UsageError: An example is too long or malformed; the message names the row.
        """
        check_hints(options)
        self._is_prompt = add_generation_prompt
        step = dataset_pb2.EncodeStep(is_generation_prompt_added=add_generation_prompt, row_format=row_format(format))
        await self._apply(dataset_pb2.DatasetStep(encode=step))

    @remote_method
    async def check(self, *, format: str | None = None) -> list[str]:  # noqa: A002 - public name
        """Find examples that have no labels; return all warnings of the dataset, including earlier warnings.

        Args:
            format: See `encode`.

        Raises:
            ValueError: The format is unknown.
        """
        step = dataset_pb2.CheckStep(row_format=row_format(format))
        return list((await self._apply(dataset_pb2.DatasetStep(check=step))).warnings)

    @remote_method
    async def pack_dataset(self) -> None:
        """Pack short examples into sequences of at most the template's `max_length`, without splitting examples.

        Raises:
            StateError: The dataset is not encoded, is encoded for sampling or already packed, or has an open loader.
            UsageError: The dataset is lazy.
        """
        await self._apply(dataset_pb2.DatasetStep(pack=dataset_pb2.PackStep()))

    @remote_method
    async def delete(self) -> None:
        """Delete the dataset on the server.

        Raises:
            StateError: A loader of the dataset is still open.
        """
        for part in self._parts:
            if part.state is not None:
                await self._delete(part.state.dataset_id)
                part.state = None

    def __len__(self) -> int:
        return self.describe().row_count

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        """Return a row, or the rows of a slice, as `peek` does; a slice is read in parts of up to 100 rows.

        Raises:
            IndexError: The dataset has no such row.
            ValueError: A step fails for a row; `peek` returns the problem instead.
        """
        if isinstance(index, slice):
            chosen = range(*index.indices(len(self)))
            return list(rows_of(self.peek, chosen)) if chosen.step == 1 else [self[position] for position in chosen]
        position = index + len(self) if index < 0 else index
        for row in rows_of(self.peek, range(max(position, 0), position + 1)):
            return row
        raise IndexError(f'the dataset has {len(self)} rows, so it has no row {index}')

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return rows_of(self.peek, range(len(self)))

    def __repr__(self) -> str:
        if len(self._parts) != 1:
            return f'{type(self).__name__}({len(self._parts)} datasets, not mixed)'
        return f'{type(self).__name__}({self._parts[0]})'

    async def dataset_id(self) -> str:
        """Return the dataset's id, creating the dataset if necessary. Call this only on the client's event loop."""
        return (await self._created()).dataset_id

    async def _created(self, part: '_Part | None' = None, *, is_lazy: bool | None = None) -> dataset_pb2.Dataset:
        part = part or self._part_of(None)
        async with self._creation_lock:
            if part.state is None:
                is_lazy = isinstance(self, LazyDataset) if is_lazy is None else is_lazy
                source = await dataset_source(self._connection, part.meta, is_streamed=self.is_streamed)
                part.state = await self._create(source, is_lazy=is_lazy)
            return part.state

    async def _create(self, source: dataset_pb2.DatasetSource, *, is_lazy: bool) -> dataset_pb2.Dataset:
        request = dataset_service_pb2.CreateDatasetRequest(
            request_id=new_id('rq'), source=source, is_lazy=is_lazy, is_streamed=self.is_streamed
        )
        return (await self._connection.unary(self._stub.CreateDataset, request)).dataset

    async def _delete(self, dataset_id: str) -> None:
        request = dataset_service_pb2.DeleteDatasetRequest(dataset_id=dataset_id)
        await self._connection.unary(self._stub.DeleteDataset, request)

    async def _apply(self, *steps: dataset_pb2.DatasetStep, meta: MetaLike | None = None) -> dataset_pb2.Dataset:
        part = self._part_of(meta)
        # Steps before the mixing are applied immediately, because only the mixture can be lazy.
        before = await self._created(part, is_lazy=False if meta is not None and len(self._parts) > 1 else None)
        request = dataset_service_pb2.ApplyRequest(request_id=new_id('rq'), dataset_id=before.dataset_id, steps=steps)
        part.state = after = (await self._connection.unary(self._stub.Apply, request)).dataset
        for warning in after.warnings[len(before.warnings) :]:
            _log.warning('dataset: %s', warning)
        return after

    def _part_of(self, meta: MetaLike | None) -> '_Part':
        if not self._parts:
            raise ValueError('the dataset has no source; pass dataset_meta')
        if meta is None and len(self._parts) > 1:
            raise ValueError('several datasets were added; choose one with dataset_meta, or call mix_dataset() first')
        for part in self._parts:
            if meta is None or part.meta is meta:
                return part
        raise ValueError('dataset_meta was not added to this dataset; call add_dataset() with this object first')


@dataclass(eq=False)
class _Part:
    """An added dataset, and its record on the server; without a record, the dataset does not exist there yet."""

    meta: MetaLike
    state: dataset_pb2.Dataset | None = None

    def __str__(self) -> str:
        source = repr(self.meta.dataset_id or 'rows in memory')
        if self.state is None:
            return f'{source}, not created yet'
        rows = 'streamed' if self.state.is_streamed else f'rows={self.state.row_count}'
        facts = f'{rows}, columns={list(self.state.columns)}, is_encoded={self.state.is_encoded}'
        return f'{source}, dataset_id={self.state.dataset_id!r}, {facts}'


class LazyDataset(Dataset):
    """A dataset that stores the original rows and transforms them each time a loader reads them.

    The server only records `map`, `encode` and `check`; `map` and `encode` must produce one row from one row. Errors in
    a row are raised when the row is read, with the row number. `filter` is applied immediately, and `pack_dataset` is
    refused.
    """


class IterableDataset(Dataset):
    """A dataset on a hub whose rows are read and changed for each loader, at a recorded commit, and are not stored."""

    is_streamed = True

    def __len__(self) -> int:
        raise TypeError('the number of rows of a streamed dataset is unknown; read some with peek()')


class IterablePackingDataset(IterableDataset):
    """A streamed dataset whose encoded examples can be packed with `pack_dataset`, 128 examples at a time."""


class PackingDataset(Dataset):
    """A dataset whose encoded examples can be packed with `pack_dataset`."""
