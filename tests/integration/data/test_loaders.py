"""LoaderService over loopback: credits, cursors, and what is refused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fixtures.data_service import (
    ENCODE,
    PACK,
    RunningData,
    chat,
    chats,
    credits_for,
    ids_of,
    ints_of,
    refusal_of,
    rows,
    serving_data,
    set_template,
    start,
)
from twinkle.api.data.v1 import dataset_pb2
from twinkle.api.data.v1 import dataset_service_pb2 as dataset_wire
from twinkle.api.data.v1 import loader_service_pb2 as wire


@pytest.fixture
async def service(tmp_path: Path, tiny_llama_dir: Path) -> AsyncIterator[RunningData]:
    """A service with nothing in it."""
    async with serving_data(tmp_path, base_models=(str(tiny_llama_dir),)) as running:
        yield running


@pytest.fixture
async def dataset_id(service: RunningData, tiny_llama_dir: Path) -> str:
    """Ten encoded chats."""
    return await make_dataset(service, tiny_llama_dir)


async def make_dataset(service: RunningData, model: Path, *, count: int = 10) -> str:
    """Encode chats that differ from each other."""
    source = chats(*(chat('u', f'answer {i}') for i in range(count)))
    return (await service.create(source, set_template(model), ENCODE)).dataset_id


async def test_batches_carry_labels_and_positions(service: RunningData, dataset_id: str) -> None:
    """Features are int32 and labelled; the last message is the end and nothing else."""
    loader = await service.open(dataset_id, 4)
    assert loader.batch_count == 3
    items = [item async for item in service.stream(start(loader.loader_id), credits_for(3))]
    assert [len(item.batch.features) for item in items] == [4, 4, 2, 0]
    assert [item.is_end for item in items] == [False, False, False, True]
    assert [item.cursor.consumed_rows for item in items] == [4, 8, 10, 10]
    feature = items[0].batch.features[0]
    ids, labels = ints_of(feature.input_ids), ints_of(feature.labels)
    assert len(ids) == len(labels)
    assert all(label in (-100, following) for label, following in zip(labels, [*ids[1:], -100], strict=True))
    assert not feature.HasField('position_ids')


async def test_every_cursor_gives_the_identical_rest(service: RunningData, dataset_id: str) -> None:
    """Over two shuffled epochs, resuming after any batch continues the same sequence."""
    loader = await service.open(dataset_id, 3, shuffle_seed=7, epoch_count=2)
    items = [item async for item in service.stream(start(loader.loader_id), credits_for(64))]
    whole = [ids_of(item) for item in items[:-1]]
    assert whole[:4] != whole[4:]
    first, second = ([ids for batch in epoch for ids in batch] for epoch in (whole[:4], whole[4:]))
    assert sorted(first) == sorted(second)
    assert [item.epoch for item in items[:-1]] == [0, 0, 0, 0, 1, 1, 1, 1]
    for index, item in enumerate(items[:-1]):
        assert await service.read_all(loader.loader_id, item.cursor) == whole[index + 1 :]


async def test_cursor_outlives_a_restart_and_fits_another_loader(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """After a restart the same loader goes on, and so does a new one that reads the same rows alike."""
    fields = {'base_models': (str(tiny_llama_dir),)}
    async with serving_data(tmp_path, **fields) as service:
        dataset_id = await make_dataset(service, tiny_llama_dir)
        loader = await service.open(dataset_id, 3, shuffle_seed=1)
        items = [item async for item in service.stream(start(loader.loader_id), credits_for(64))]
    async with serving_data(tmp_path, **fields) as service:
        again = await service.open(await make_dataset(service, tiny_llama_dir), 3, shuffle_seed=1)
        expected = [ids_of(item) for item in items[1:-1]]
        assert await service.read_all(loader.loader_id, items[0].cursor) == expected
        assert await service.read_all(again.loader_id, items[0].cursor) == expected


async def test_cursor_of_another_reading_is_refused(service: RunningData, dataset_id: str) -> None:
    """Another batch size, order or count makes the position meaningless."""
    first = await service.open(dataset_id, 2)
    items = [item async for item in service.stream(start(first.loader_id), credits_for(1))]
    cursor = items[0].cursor
    forged = dataset_pb2.Cursor(consumed_rows=4, state=cursor.state)
    others = [(await service.open(dataset_id, 3), cursor), (await service.open(dataset_id, 2, shuffle_seed=1), cursor)]
    for loader, wrong in [*others, (first, forged), (first, dataset_pb2.Cursor(consumed_rows=-1))]:
        refused = await refusal_of(service.stream(start(loader.loader_id, wrong)))
        assert (refused.code, refused.field.split('.')[1]) == ('INVALID_ARGUMENT', 'cursor')


async def test_slow_reader_gets_no_more_than_its_credits(service: RunningData, dataset_id: str) -> None:
    """After a credit is used nothing comes until the next one, however long the reader waits."""
    loader = await service.open(dataset_id, 1, epoch_count=0)
    call = service.loaders.StreamBatches(metadata=service.metadata)
    await call.write(start(loader.loader_id))
    received = 0
    for granted in (1, 3, 2):
        await call.write(credits_for(granted))
        for _ in range(granted):
            item = await call.read()
            received += 1
            assert item.cursor.consumed_rows == received
        extra = asyncio.ensure_future(call.read())
        # Another whole call is served meanwhile, so the service had time to send too much.
        request = dataset_wire.GetDatasetRequest(dataset_id=dataset_id)
        await service.datasets.GetDataset(request, metadata=service.metadata)
        assert not extra.done()
        await call.write(credits_for(1))
        assert (await extra).cursor.consumed_rows == received + 1
        received += 1
    call.cancel()


async def test_reader_that_ends_gets_what_it_asked_for(service: RunningData, dataset_id: str) -> None:
    """Ending one's side early is no error: the batches paid for come, without an end mark."""
    loader = await service.open(dataset_id, 2)
    items = [item async for item in service.stream(start(loader.loader_id), credits_for(2))]
    assert [item.is_end for item in items] == [False, False]


async def test_last_partial_batch_can_be_left_out(service: RunningData, dataset_id: str) -> None:
    """With it left out, every batch is full and the count says so."""
    loader = await service.open(dataset_id, 4, is_last_partial_dropped=True, epoch_count=2)
    assert loader.batch_count == 2
    assert [len(batch) for batch in await service.read_all(loader.loader_id)] == [4, 4, 4, 4]


async def test_loader_that_reads_nothing_ends_at_once(service: RunningData, dataset_id: str) -> None:
    """Fewer rows than a batch, with partial ones left out, is an end even without end."""
    loader = await service.open(dataset_id, 11, is_last_partial_dropped=True, epoch_count=0)
    assert loader.batch_count == 0
    assert await service.read_all(loader.loader_id) == []


async def test_packs_have_positions_that_restart(service: RunningData, tiny_llama_dir: Path) -> None:
    """A pack's feature says where its samples begin."""
    source = chats(*(chat('u', 'a' * i) for i in range(8)))
    dataset = await service.create(source, set_template(tiny_llama_dir, max_length=120), ENCODE, PACK)
    loader = await service.open(dataset.dataset_id, dataset.row_count)
    items = [item async for item in service.stream(start(loader.loader_id), credits_for(1))]
    starts = [ints_of(feature.position_ids).count(0) for feature in items[0].batch.features]
    assert sum(starts) == 8
    refused = await refusal_of(service.stream(start(loader.loader_id, is_trajectory_included=True)))
    assert refused.field == 'start.is_trajectory_included'


async def test_chats_come_with_the_batch_where_asked_for(service: RunningData, tiny_llama_dir: Path) -> None:
    """The chat each example was encoded from, with what was carried along."""
    trajectory = chat('question', 'answer')
    trajectory.user_data['truth'].number_value = 3
    call = trajectory.messages[1].tool_calls.add(name='add', tool_call_id='c')
    call.arguments.update({'a': 1})
    dataset = await service.create(chats(trajectory), set_template(tiny_llama_dir), ENCODE)
    loader = await service.open(dataset.dataset_id, 1)
    first = start(loader.loader_id, is_trajectory_included=True)
    items = [item async for item in service.stream(first, credits_for(1))]
    assert items[0].trajectories == [trajectory]


@pytest.mark.parametrize(
    ('messages', 'code', 'detail'),
    [
        ([credits_for(1)], 'ABORTED', 'STREAM_OUT_OF_ORDER'),
        ([wire.StreamBatchesRequest()], 'INVALID_ARGUMENT', 'part'),
        ([start('')], 'INVALID_ARGUMENT', 'start.loader_id'),
        ([start('ld-nothing')], 'NOT_FOUND', 'LOADER_NOT_FOUND'),
        (['start', 'start'], 'ABORTED', 'STREAM_OUT_OF_ORDER'),
        (['start', credits_for(0)], 'INVALID_ARGUMENT', 'credits'),
        (['start', credits_for(65)], 'INVALID_ARGUMENT', 'credits'),
        ([], 'ABORTED', 'STREAM_OUT_OF_ORDER'),
    ],
)
async def test_malformed_stream_is_refused(
    service: RunningData, dataset_id: str, messages: list[Any], code: str, detail: str
) -> None:
    """Messages out of order, empty or out of range are named."""
    loader = await service.open(dataset_id, 1)
    sent = [start(loader.loader_id) if message == 'start' else message for message in messages]
    refused = await refusal_of(service.stream(*sent))
    assert refused.code == code
    assert detail in (refused.field, refused.reason)


@pytest.mark.parametrize(
    ('fields', 'field'),
    [({'batch_size': 0}, 'batch_size'), ({'epoch_count': -1}, 'epoch_count'), ({'request_id': ''}, 'request_id'),
     ({'dataset_id': ''}, 'dataset_id'), ({'batch_size': 1 << 20}, 'batch_size')],
)  # fmt: skip
async def test_bad_loader_is_refused_by_field(service: RunningData, fields: dict[str, Any], field: str) -> None:
    """Each wrong field is named."""
    values = {'request_id': 'r', 'dataset_id': 'ds-x', 'batch_size': 1, **fields}
    request = wire.OpenLoaderRequest(**values)
    refused = await refusal_of(service.loaders.OpenLoader(request, metadata=service.metadata))
    assert (refused.code, refused.field) == ('INVALID_ARGUMENT', field)


async def test_only_encoded_datasets_are_loaded(service: RunningData) -> None:
    """Rows that are not tokens cannot be batches."""
    dataset = await service.create(rows({'x': 1}))
    refused = await refusal_of(service.open(dataset.dataset_id, 1))
    assert (refused.code, refused.reason) == ('FAILED_PRECONDITION', 'DATASET_NOT_READY')


async def test_open_loader_keeps_its_dataset_as_it_is(service: RunningData, dataset_id: str) -> None:
    """A dataset that is read is neither changed nor deleted until the loader is closed."""
    loader = await service.open(dataset_id, 1)
    delete = dataset_wire.DeleteDatasetRequest(dataset_id=dataset_id)
    for call in (service.datasets.DeleteDataset(delete, metadata=service.metadata), service.apply(dataset_id, PACK)):
        refused = await refusal_of(call)
        assert (refused.code, refused.reason) == ('FAILED_PRECONDITION', 'IN_USE')
    close = wire.CloseLoaderRequest(loader_id=loader.loader_id)
    for _ in range(2):
        await service.loaders.CloseLoader(close, metadata=service.metadata)
    assert (await service.apply(dataset_id, PACK)).row_count == 1
    await service.datasets.DeleteDataset(delete, metadata=service.metadata)


async def test_foreign_loader_is_as_an_unknown_one(service: RunningData, dataset_id: str) -> None:
    """Another tenant can neither read nor close a loader."""
    loader = await service.open(dataset_id, 5)
    bob = service.as_tenant('bob')
    refused = await refusal_of(bob.stream(start(loader.loader_id), credits_for(1)))
    assert (refused.code, refused.reason) == ('NOT_FOUND', 'LOADER_NOT_FOUND')
    await bob.loaders.CloseLoader(wire.CloseLoaderRequest(loader_id=loader.loader_id), metadata=bob.metadata)
    assert len(await service.read_all(loader.loader_id)) == 2


async def test_repeated_open_is_the_same_loader(service: RunningData, dataset_id: str) -> None:
    """The same request id opens one loader; with other content it is refused."""
    first, second = [await service.open(dataset_id, 2, request_id='r') for _ in range(2)]
    assert first == second
    assert (await refusal_of(service.open(dataset_id, 3, request_id='r'))).reason == 'REQUEST_ID_REUSED'


async def test_cancelled_reader_leaves_the_service_well(service: RunningData, dataset_id: str) -> None:
    """A reader that goes away in the middle costs nobody anything."""
    loader = await service.open(dataset_id, 1, epoch_count=0)
    for _ in range(20):
        call = service.loaders.StreamBatches(metadata=service.metadata)
        await call.write(start(loader.loader_id))
        await call.write(credits_for(64))
        await call.read()
        call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await call.read()
    again = await service.open(dataset_id, 10)
    batches = await service.read_all(again.loader_id)
    assert np.shape(batches)[:2] == (1, 10)
