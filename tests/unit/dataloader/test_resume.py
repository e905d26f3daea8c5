"""A resumed run gets exactly the remaining batches, for datasets and streams, on any number of ranks."""

import json
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.dataloader import DataLoader
from twinkle.dataset import (
    DatasetMeta,
    IterableDataset,
    IterablePackingDataset,
    LazyDataset,
    RefusedRow,
    WindowPacker,
)
from twinkle.infra import DeviceMesh

EPOCHS = 3


def refuse_some(value: int) -> int:
    """Return the value, or raise ValueError for values that represent invalid data."""
    if value % 7 == 3:
        raise ValueError(value)
    return value


def dataset_of(kind: str, size: int) -> Any:
    """Return a dataset with rows `{'x': ...}`; some of the rows cannot be read."""
    dataset = (LazyDataset if kind == 'lazy' else IterableDataset)(DatasetMeta(data=[{'x': i} for i in range(size)]))
    dataset.cast_column('x', refuse_some)
    return dataset


def values(batches: Iterable[list[dict[str, int]]]) -> list[list[int]]:
    """Return the numbers in batches."""
    return [[row['x'] for row in batch] for batch in batches]


def joined(parts: list[list[list[int]]]) -> list[list[int]]:
    """Return the batches that consist of the parts of all ranks."""
    return [list(chain.from_iterable(batch)) for batch in zip(*parts, strict=True)]


@given(
    kind=st.sampled_from(['lazy', 'stream']),
    size=st.integers(1, 40),
    batch_ranks=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    shuffle=st.booleans(),
    buffer=st.integers(1, 9),
    stop=st.floats(0, 1),
)
def test_resumed_ranks_get_the_remaining_batches(
    kind: str,
    size: int,
    batch_ranks: tuple[int, int],
    shuffle: bool,  # noqa: FBT001 - drawn
    buffer: int,
    stop: float,
) -> None:
    """A run that resumes after any batch, by state or by count, gives each rank its remaining batches."""
    per_rank, ranks = batch_ranks
    mesh = DeviceMesh.from_sizes(dp_size=ranks)
    options: dict[str, Any] = {'shuffle': shuffle, 'shuffle_buffer': buffer, 'device_mesh': mesh}

    def loader(rank: int) -> DataLoader:
        return DataLoader(dataset_of(kind, size), batch_size=per_rank * ranks, rank=rank, **options)

    for rank in range(ranks):
        first = loader(rank)
        states, batches = [first.get_state()], []
        for _ in range(EPOCHS):
            for batch in first:
                batches.append(batch)
                states.append(first.get_state())
        position = round(stop * len(batches))
        for resume_from in (json.loads(json.dumps(states[position])), states[position]['consumed_train_samples']):
            second = loader(rank)
            second.resume_from_checkpoint(resume_from)
            is_over = position == len(batches)
            remaining = (
                [] if is_over else [batch for _ in range(EPOCHS - states[position]['epoch']) for batch in second]
            )
            assert values(remaining)[: len(batches) - position] == values(batches[position:])
            if not is_over:
                assert second.get_state()['consumed_train_samples'] >= states[-1]['consumed_train_samples']


@given(
    size=st.integers(0, 40), per_rank=st.integers(1, 4), ranks=st.integers(1, 4), is_stream=st.booleans(),
)  # fmt: skip
def test_ranks_divide_each_batch(size: int, per_rank: int, ranks: int, is_stream: bool) -> None:  # noqa: FBT001
    """The parts of all ranks together are the batches of one process, and no part is empty."""
    mesh = DeviceMesh.from_sizes(dp_size=ranks)
    meta = DatasetMeta(data=[{'x': i} for i in range(size)])
    dataset = IterableDataset(meta) if is_stream else LazyDataset(meta)
    batch_size = per_rank * ranks
    options: dict[str, Any] = {'batch_size': batch_size, 'shuffle': True, 'shuffle_buffer': 5}
    parts = [values(DataLoader(dataset, device_mesh=mesh, rank=rank, **options)) for rank in range(ranks)]
    whole = values(DataLoader(dataset, min_batch_size=ranks, **options))
    assert joined(parts) == whole
    assert all(part for batches in parts for part in batches)


def test_packs_of_a_stream_resume_exactly() -> None:
    """A resumed stream of packs gives bitwise equal packs."""
    lengths = np.clip(np.random.default_rng(1).lognormal(3, 0.8, 300).astype(int), 1, 128)

    class Packs:
        def __iter__(self) -> Any:
            packer = WindowPacker(capacity=128, interval=16)
            for number, length in enumerate(lengths):
                ids = np.full(length, number, dtype=np.int32)
                yield from packer.add({'input_ids': ids, 'labels': ids})
            yield from packer.finish()

    first = DataLoader(Packs(), batch_size=4, shuffle=True, shuffle_buffer=8)
    batches, states = [], []
    for batch in first:
        batches.append(batch)
        states.append(first.get_state())
    for position in (1, len(batches) // 2, len(batches) - 1):
        second = DataLoader(Packs(), batch_size=4, shuffle=True, shuffle_buffer=8)
        second.resume_from_checkpoint(states[position - 1])
        for resumed, other in zip(second, batches[position:], strict=True):
            for name in ('input_ids', 'labels', 'position_ids'):
                assert [pack[name].tobytes() for pack in resumed] == [pack[name].tobytes() for pack in other]


def test_endless_packs_resume_exactly(tiny_llama_dir: Path) -> None:
    """A resumed rank of an endless, encoded, packed and shuffled stream gets bitwise equal packs."""

    def loader() -> DataLoader:
        turns = [
            [{'role': 'user', 'content': 'u'}, {'role': 'assistant', 'content': 'x' * (i % 23)}] for i in range(30)
        ]
        dataset = IterablePackingDataset(
            DatasetMeta(data=[{'messages': turn} for turn in turns]), packing_interval=8, cyclic=True
        )
        dataset.set_template('Template', model_id=str(tiny_llama_dir), max_length=120)
        dataset.encode()
        dataset.pack_dataset()
        mesh = DeviceMesh.from_sizes(dp_size=2)
        return DataLoader(dataset, batch_size=4, shuffle=True, shuffle_buffer=3, device_mesh=mesh, rank=1)

    first, second = loader(), loader()
    batches = iter(first)
    head = list(islice(batches, 9))
    second.resume_from_checkpoint(first.get_state())
    assert [len(batch) for batch in head] == [2] * 9
    for resumed, other in islice(zip(second, batches, strict=True), 5):
        assert [pack['input_ids'].tobytes() for pack in resumed] == [pack['input_ids'].tobytes() for pack in other]


def test_state_does_not_depend_on_the_number_of_ranks() -> None:
    """A run may resume with more ranks than before."""
    stream = dataset_of('stream', 50)
    one = DataLoader(stream, batch_size=4, min_batch_size=4, shuffle=True)
    head = list(islice(one, 3))
    mesh = DeviceMesh.from_sizes(dp_size=2)
    two = [DataLoader(stream, batch_size=4, shuffle=True, device_mesh=mesh, rank=rank) for rank in range(2)]
    for loader in two:
        loader.resume_from_checkpoint(one.get_state())
    whole = values(DataLoader(stream, batch_size=4, min_batch_size=4, shuffle=True))
    assert [*values(head), *joined([values(loader) for loader in two])][: len(whole)] == whole


def test_invalid_stream_states_are_refused() -> None:
    """States with another seed or buffer, positions inside a batch, and iterators as datasets are refused."""
    stream = dataset_of('stream', 30)
    loader = DataLoader(stream, batch_size=4, shuffle=True)
    list(islice(loader, 2))
    for other in ({'shuffle': True, 'seed': 1}, {'shuffle': True, 'shuffle_buffer': 7}, {}):
        with pytest.raises(ValueError, match='the state has'):
            DataLoader(stream, batch_size=4, **other).resume_from_checkpoint(loader.get_state())
    within = DataLoader(stream, batch_size=4)
    within.skip_consumed_samples(5)
    with pytest.raises(ValueError, match='consumed_train_samples'):
        next(iter(within))
    empty = DataLoader(IterableDataset(DatasetMeta(data=[])), batch_size=4)
    empty.skip_consumed_samples(4)
    with pytest.raises(ValueError, match='consumed_train_samples'):
        next(iter(empty))
    for iterator in (iter([1]), 3):
        with pytest.raises(TypeError):
            DataLoader(iterator, batch_size=1)
    with pytest.raises(TypeError):
        len(within)


def test_a_new_loop_over_a_stream_is_a_new_epoch() -> None:
    """A new loop over a stream starts the next epoch, even if the previous loop ended early."""
    stream = dataset_of('stream', 30)
    loader, other = (DataLoader(stream, batch_size=4, shuffle=True) for _ in range(2))
    next(iter(loader))
    second = values(loader)
    list(other)
    assert second == values(other)
    assert not any(isinstance(row, RefusedRow) for batch in loader for row in batch)
