"""Lazy datasets: filters are applied immediately, other steps when rows are read, and cursors stay exact."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.data_service import (
    ENCODE,
    PACK,
    RunningData,
    chat,
    chats,
    credits_for,
    map_with,
    new_request_id,
    refusal_of,
    rows,
    serving_data,
    set_template,
    start,
)
from twinkle.api.data.v1 import dataset_pb2, dataset_service_pb2

TEXTS = ('a', 'two words', 'and three words', 'four', 'five and no more')
SOURCE = chats(*(chat('question', text) for text in TEXTS))


@pytest.fixture
async def service(tmp_path: Path, tiny_llama_dir: Path) -> AsyncIterator[RunningData]:
    """A data service that may read the folder of the tiny model."""
    async with serving_data(tmp_path, base_models=(str(tiny_llama_dir),)) as running:
        yield running


async def create(service: RunningData, source: Any, *steps: Any) -> dataset_pb2.Dataset:
    """Create a lazy dataset and return it."""
    request = dataset_service_pb2.CreateDatasetRequest(
        request_id=new_request_id(), source=source, steps=steps, is_lazy=True
    )
    return (await service.datasets.CreateDataset(request, metadata=service.metadata)).dataset


def self_cognition(*names: str) -> Any:
    """Return rows that a preprocessor converts to chats."""
    return rows(*({'query': 'who are you', 'response': f'{{{{NAME}}}} {name}'} for name in names))


async def test_lazy_rows_equal_those_of_an_eager_dataset(service: RunningData, tiny_llama_dir: Path) -> None:
    """A lazy dataset gives the same batches as an eager dataset, for two shuffled epochs and from every cursor."""
    steps = [
        map_with('SelfCognitionProcessor', model_name='m', model_author='us'),
        set_template(tiny_llama_dir),
        ENCODE,
    ]
    source = self_cognition('x', 'yy', 'zzz', 'and four', 'five')
    eager, lazy = await service.create(source, *steps), await create(service, source, *steps)
    assert (lazy.is_lazy, lazy.is_encoded, lazy.row_count, lazy.token_count) == (True, True, 5, 0)
    assert list(lazy.columns) == ['query', 'response']
    assert not eager.is_lazy
    loaders = [await service.open(item.dataset_id, 2, shuffle_seed=3, epoch_count=2) for item in (eager, lazy)]
    whole = await service.read_all(loaders[0].loader_id)
    items = [item async for item in service.stream(start(loaders[1].loader_id), credits_for(64))]
    assert await service.read_all(loaders[1].loader_id) == whole
    for index, item in enumerate(items[:-1]):
        assert await service.read_all(loaders[1].loader_id, item.cursor) == whole[index + 1 :]


async def test_lazy_features_and_chats_equal_those_of_an_eager_dataset(
    service: RunningData, tiny_llama_dir: Path
) -> None:
    """A lazy dataset gives the same tensors, chats and user data as an eager dataset."""
    steps = [set_template(tiny_llama_dir), ENCODE]
    turns = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'two words'}]
    source = rows(*({'messages': turns, 'level': level, 'tags': ['x', {'y': level}]} for level in (1, 2)))
    eager, lazy = await service.create(source, *steps), await create(service, source, *steps)
    read: list[Any] = []
    for dataset in (eager, lazy):
        loader = await service.open(dataset.dataset_id, 2)
        begin = start(loader.loader_id, is_trajectory_included=True)
        item, _ = [item async for item in service.stream(begin, credits_for(64))]
        read.append(item)
    assert read[1].batch == read[0].batch
    assert read[1].trajectories == read[0].trajectories
    assert read[1].trajectories[1].user_data['level'].number_value == 2


async def test_lazy_dataset_survives_a_restart(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """Pending steps and cursors survive a restart; a dataset with other steps refuses the cursor."""
    fields = {'base_models': (str(tiny_llama_dir),)}
    async with serving_data(tmp_path / 'state', **fields) as service:
        dataset = await create(service, SOURCE, set_template(tiny_llama_dir), ENCODE)
        other = await create(service, SOURCE, set_template(tiny_llama_dir, default_system='be kind'), ENCODE)
        loader = await service.open(dataset.dataset_id, 2, shuffle_seed=1)
        foreign = await service.open(other.dataset_id, 2, shuffle_seed=1)
        items = [item async for item in service.stream(start(loader.loader_id), credits_for(64))]
        whole = await service.read_all(loader.loader_id)
        refused = await refusal_of(service.stream(start(foreign.loader_id, items[0].cursor)))
        assert (refused.code, refused.field) == ('INVALID_ARGUMENT', 'start.cursor')
    async with serving_data(tmp_path / 'state', **fields) as service:
        assert await service.read_all(loader.loader_id, items[0].cursor) == whole[1:]


async def test_invalid_row_is_named_when_it_is_read(service: RunningData, tiny_llama_dir: Path) -> None:
    """Batches before an invalid row can be read, and the error contains the row's index in the dataset."""
    source = chats(*(chat('question', 'a ' * (90 if index == 3 else 1)) for index in range(5)))
    dataset = await create(service, source, set_template(tiny_llama_dir, max_length=100), ENCODE)
    loader = await service.open(dataset.dataset_id, 2)
    first = [item async for item in service.stream(start(loader.loader_id), credits_for(1))]
    assert len(first[0].batch.features) == 2
    refused = await refusal_of(service.stream(start(loader.loader_id), credits_for(2)))
    assert refused.code == 'INVALID_ARGUMENT'
    assert refused.field.startswith('rows[3]')


async def test_filter_is_applied_immediately_to_computed_rows(service: RunningData, tiny_llama_dir: Path) -> None:
    """A filter immediately removes the same rows as from an eager dataset, and the remaining batches are equal."""
    sanity_filter = dataset_pb2.DatasetStep(filter=dataset_pb2.FilterStep(filter='MessageSanityFilter'))
    source = chats(chat('question', 'fine'), chat('question', ''), chat('question', 'fine too'))
    eager = await service.create(source, sanity_filter, set_template(tiny_llama_dir), ENCODE)
    lazy = await create(service, source, sanity_filter, set_template(tiny_llama_dir), ENCODE)
    assert lazy.row_count == eager.row_count < 3
    read = [await service.read_all((await service.open(item.dataset_id, 2)).loader_id) for item in (eager, lazy)]
    assert read[0] == read[1]


@pytest.mark.parametrize(
    ('steps', 'code'),
    [
        ([ENCODE], 'FAILED_PRECONDITION'),
        (['template', ENCODE, ENCODE], 'FAILED_PRECONDITION'),
        (['template', ENCODE, PACK], 'INVALID_ARGUMENT'),
        (['split'], 'INVALID_ARGUMENT'),
        ([map_with('NoSuchProcessor')], 'INVALID_ARGUMENT'),
        (
            ['template', ENCODE, map_with('SelfCognitionProcessor', model_name='m', model_author='a')],
            'FAILED_PRECONDITION',
        ),
    ],
)
async def test_invalid_steps_are_refused_immediately(
    service: RunningData, tiny_llama_dir: Path, steps: list[Any], code: str
) -> None:
    """A request with an invalid step is refused before a row is read, and none of its steps is added."""
    split = set_template(tiny_llama_dir, truncation_strategy=dataset_pb2.TRUNCATION_STRATEGY_SPLIT)
    steps_by_name = {'template': set_template(tiny_llama_dir), 'split': split}
    dataset = await create(service, SOURCE)
    requested = [steps_by_name[step] if isinstance(step, str) else step for step in steps]
    assert (await refusal_of(service.apply(dataset.dataset_id, *requested))).code == code
    request = dataset_service_pb2.GetDatasetRequest(dataset_id=dataset.dataset_id)
    assert not (await service.datasets.GetDataset(request, metadata=service.metadata)).dataset.steps


async def test_lazy_datasets_are_neither_exported_nor_mixed(service: RunningData, tiny_llama_dir: Path) -> None:
    """A lazy dataset cannot be exported or mixed, but a mixture of eager datasets may be lazy."""
    lazy = await create(service, SOURCE)
    export = dataset_service_pb2.ExportDatasetRequest(dataset_id=lazy.dataset_id, format=dataset_pb2.FILE_FORMAT_JSONL)
    refused = await refusal_of(service.datasets.ExportDataset(export, metadata=service.metadata))
    assert (refused.code, refused.field) == ('INVALID_ARGUMENT', 'dataset_id')
    raw = await service.create(SOURCE)
    for part, allowed in ((lazy, False), (raw, True)):
        mixture = dataset_pb2.MixtureSource(dataset_ids=[part.dataset_id, raw.dataset_id])
        source = dataset_pb2.DatasetSource(mixture=mixture)
        if allowed:
            assert (await create(service, source, set_template(tiny_llama_dir), ENCODE)).row_count == 2 * len(TEXTS)
        else:
            assert (await refusal_of(create(service, source))).field == 'source.mixture.dataset_ids'
