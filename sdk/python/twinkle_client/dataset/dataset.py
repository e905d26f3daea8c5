"""A dataset held by the data service: made from rows, rewritten, tokenised and packed there."""

import asyncio
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from twinkle.api.data.v1 import dataset_pb2, dataset_service_pb2
from twinkle.api.data.v1.dataset_service_pb2_grpc import DatasetServiceStub
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.convert.config import component_name, struct
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

_HINTS: dict[str, tuple[Any, ...]] = {
    'batched': (None, True),
    'batch_size': (None,),
    'keep_in_memory': (None,),
    'load_from_cache_file': (None, False),
    'num_proc': (None, 0, 1),
    'desc': (None,),
}
"""Options of the library's verbs, and what they may say without a word: that is so at the server anyway."""


class Dataset:
    """A dataset. It is made at the first verb; each verb is done when it returns."""

    def __init__(self, dataset_meta: MetaLike | str | None = None, *, client: TwinkleClient | None = None) -> None:
        """Describe a dataset.

        Args:
            dataset_meta: what to read; a plain string is its id.
            client: where. Unset: the client that was initialised last.

        Raises:
            RuntimeError: there is no client.
        """
        self._client = current_client(client)
        self._connection = self._client.connection
        self._stub = DatasetServiceStub(self._connection.channel)
        self._parts: list[_Part] = []
        if dataset_meta is not None:
            self.add_dataset(dataset_meta)
        self._making = asyncio.Lock()
        self._is_prompt = False
        self._model_id = ''

    @property
    def client(self) -> TwinkleClient:
        """The client it belongs to."""
        return self._client

    @property
    def loop_thread(self) -> LoopThread:
        """Where its coroutines run."""
        return self._connection.loop_thread

    @property
    def is_prompt_only(self) -> bool:
        """Whether it was encoded for sampling, with `add_generation_prompt`."""
        return self._is_prompt

    def add_dataset(self, dataset_meta: MetaLike | str) -> None:
        """Add another dataset's rows; `mix_dataset` joins them to the others.

        Args:
            dataset_meta: what to read; a plain string is its id.
        """
        self._parts.append(_Part(DatasetMeta(dataset_meta) if isinstance(dataset_meta, str) else dataset_meta))

    @remote_method
    async def mix_dataset(self, *, interleave: bool = True) -> None:
        """Join the added datasets into one.

        Args:
            interleave: rows alternate between them, and what is left of the longer ones follows. False: one after
                the other.

        Raises:
            ValueError: nothing was added.
            UsageError: some are encoded and some are not, or one is lazy already.
        """
        if not self._parts:
            raise ValueError('there is nothing to mix; add_dataset() first')
        # A mixture is lazy; what it is mixed of is not.
        ids = [(await self._made(part, is_lazy=False)).dataset_id for part in self._parts]
        mixture = dataset_pb2.MixtureSource(dataset_ids=ids, is_interleaved=interleave)
        state = await self._create(dataset_pb2.DatasetSource(mixture=mixture), is_lazy=isinstance(self, LazyDataset))
        self._parts = [_Part(self._parts[0].meta, state)]
        for part_id in ids:
            await self._delete(part_id)

    @remote_method
    async def save_as(self, output_path: str | Path, format: str | None = None) -> None:  # noqa: A002 - as users type
        """Write the rows to a file of this machine, whole or not at all.

        Args:
            output_path: where.
            format: 'jsonl', 'parquet' or 'csv'. Unset: what the suffix says.

        Raises:
            ValueError: the format is unknown.
            UsageError: it cannot hold these rows, or the dataset is lazy.
        """
        dataset_id = (await self._made()).dataset_id
        await save_dataset(self._connection, dataset_id, Path(output_path), file_format=format)

    @remote_method
    async def describe(self) -> dataset_pb2.Dataset:
        """Return the dataset as it is now: rows, columns, tokens, warnings."""
        return await self._made()

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
        """Choose how chats become tokens.

        Args:
            template_func: a template's name; see the server's info.
            model_id: model whose tokenizer and chat template are used.
            max_length: most tokens of an example.
            truncation_strategy: 'raise', 'left', 'right', 'split' or 'delete'.
            default_system: system message for chats that have none.
            enable_thinking: whether the model may think before it answers.

        Raises:
            ValueError: the strategy is unknown.
            UsageError: the server refuses; the message names the field.
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
        """Rewrite the rows by a preprocessor.

        Args:
            preprocess_func: its name, its class, or an object of a class that the server has, too.
            dataset_meta: which of several added datasets. Unset: the only one.
            init_args: its constructor's arguments, where a name or class is given.
            options: `batched`, `num_proc` and other options of the library's `map`; those without effect are logged.

        Raises:
            TypeError: the object's arguments cannot be read back from it, or an option is unknown.
            UsageError: the server refuses; the message names the row and field.
        """
        _check_hints(options)
        name, arguments = _component(preprocess_func, init_args)
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
        """Keep the rows that a filter accepts; arguments as for `map`."""
        _check_hints(options)
        name, arguments = _component(filter_func, init_args)
        step = dataset_pb2.FilterStep(filter=name, init_args=struct(arguments, field=name))
        await self._apply(dataset_pb2.DatasetStep(filter=step), meta=dataset_meta)

    @remote_method
    async def encode(self, *, add_generation_prompt: bool = False, **options: Any) -> None:
        """Turn chats into tokens.

        Args:
            add_generation_prompt: end with the opening of an assistant turn, without labels, for sampling.
            options: as for `map`.

        Raises:
            StateError: there is no template yet.
            UsageError: an example is too long or malformed; the message names the row.
        """
        _check_hints(options)
        self._is_prompt = add_generation_prompt
        step = dataset_pb2.EncodeStep(is_generation_prompt_added=add_generation_prompt)
        await self._apply(dataset_pb2.DatasetStep(encode=step))

    @remote_method
    async def check(self) -> list[str]:
        """Look for examples that would train on nothing; return what was found."""
        return list((await self._apply(dataset_pb2.DatasetStep(check=dataset_pb2.CheckStep()))).warnings)

    @remote_method
    async def pack_dataset(self) -> None:
        """Join short examples into packs of at most the template's `max_length`; none is cut.

        Raises:
            StateError: it is not encoded yet.
        """
        await self._apply(dataset_pb2.DatasetStep(pack=dataset_pb2.PackStep()))

    @remote_method
    async def delete(self) -> None:
        """Delete it at the server.

        Raises:
            StateError: a loader still reads it.
        """
        for part in self._parts:
            if part.state is not None:
                await self._delete(part.state.dataset_id)
                part.state = None

    def __len__(self) -> int:
        return self.describe().row_count

    async def dataset_id(self) -> str:
        """Return its id at the server, making it if need be. On the client's own loop only."""
        return (await self._made()).dataset_id

    async def _made(self, part: '_Part | None' = None, *, is_lazy: bool | None = None) -> dataset_pb2.Dataset:
        part = part or self._part_of(None)
        async with self._making:
            if part.state is None:
                is_lazy = isinstance(self, LazyDataset) if is_lazy is None else is_lazy
                part.state = await self._create(await dataset_source(self._connection, part.meta), is_lazy=is_lazy)
            return part.state

    async def _create(self, source: dataset_pb2.DatasetSource, *, is_lazy: bool) -> dataset_pb2.Dataset:
        request = dataset_service_pb2.CreateDatasetRequest(request_id=new_id('rq'), source=source, is_lazy=is_lazy)
        return (await self._connection.unary(self._stub.CreateDataset, request)).dataset

    async def _delete(self, dataset_id: str) -> None:
        request = dataset_service_pb2.DeleteDatasetRequest(dataset_id=dataset_id)
        await self._connection.unary(self._stub.DeleteDataset, request)

    async def _apply(self, *steps: dataset_pb2.DatasetStep, meta: MetaLike | None = None) -> dataset_pb2.Dataset:
        part = self._part_of(meta)
        # What is changed before it is mixed is changed at once: the mixture is what is lazy.
        before = await self._made(part, is_lazy=False if meta is not None and len(self._parts) > 1 else None)
        request = dataset_service_pb2.ApplyRequest(request_id=new_id('rq'), dataset_id=before.dataset_id, steps=steps)
        part.state = after = (await self._connection.unary(self._stub.Apply, request)).dataset
        for warning in after.warnings[len(before.warnings) :]:
            _log.warning('dataset: %s', warning)
        return after

    def _part_of(self, meta: MetaLike | None) -> '_Part':
        if not self._parts:
            raise ValueError('dataset_meta is missing: say what to read')
        if meta is None and len(self._parts) > 1:
            raise ValueError('there are several datasets here; say which by dataset_meta, or call mix_dataset() first')
        for part in self._parts:
            if meta is None or part.meta is meta:
                return part
        raise ValueError('dataset_meta was not added to this dataset')


@dataclass(eq=False)
class _Part:
    """A dataset that was added, and what the server knows of it; None until it is made."""

    meta: MetaLike
    state: dataset_pb2.Dataset | None = None


class LazyDataset(Dataset):
    """A dataset whose rows are kept as they came, and worked out each time a loader reads them.

    `map`, `encode` and `check` are noted and return at once; each has to make one row of one. What is wrong with a row
    is raised by reading it, by its number. `filter` is done at once.
    """


class IterableDataset(Dataset):
    """Not served: the data service keeps rows on its disk and reads them by index."""

    def __init__(self, dataset_meta: MetaLike | str | None = None, *, client: TwinkleClient | None = None) -> None:
        """Refuse.

        Raises:
            NotImplementedError: always; says what to use.
        """
        del dataset_meta, client
        name = type(self).__name__
        raise NotImplementedError(
            f'{name} is not served; LazyDataset works rows out as they are read, twinkle.dataset.{name} is in process'
        )


class IterablePackingDataset(IterableDataset):
    """Not served, as `IterableDataset`."""


class PackingDataset(Dataset):
    """A dataset whose examples are packed after they are encoded: call `pack_dataset`."""


def _check_hints(options: Mapping[str, Any]) -> None:
    unknown = sorted(set(options) - set(_HINTS))
    if unknown:
        raise TypeError(f'unknown options {unknown}; known are {sorted(_HINTS)}')
    for name, value in options.items():
        if value not in _HINTS[name]:
            _log.warning('%s=%r has no effect: the data service decides how it works', name, value)


def _component(component: Any, init_args: Mapping[str, Any] | None) -> tuple[str, Mapping[str, Any]]:
    """Return name and constructor arguments of a component given by name, class or object."""
    if isinstance(component, str | type):
        return component_name(component), init_args or {}
    kind = cast(type[Any], type(component))
    if inspect.isroutine(component):
        raise TypeError('code does not travel: give the name of a preprocessor that the server has')
    if init_args:
        raise TypeError(f'{kind.__name__} is an object already; give init_args with its name or class')
    arguments: dict[str, Any] = {}
    for name in inspect.signature(kind).parameters:
        places = [place for place in (name, f'_{name}') if hasattr(component, place)]
        if not places:
            raise TypeError(f'{kind.__name__}.{name} cannot be read back; give {kind.__name__!r} with init_args')
        value = getattr(component, places[0])
        if value is not None:
            arguments[name] = value
    return kind.__name__, arguments
