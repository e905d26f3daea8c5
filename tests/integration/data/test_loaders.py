"""LoaderService over loopback: credits, cursors, and invalid requests."""

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
    """A service without datasets."""
    async with serving_data(tmp_path, base_models=(str(tiny_llama_dir),)) as running:
        yield running


@pytest.fixture
async def dataset_id(service: RunningData, tiny_llama_dir: Path) -> str:
    """The id of a dataset with ten encoded chats."""
    return await make_dataset(service, tiny_llama_dir)


async def make_dataset(service: RunningData, model: Path, *, count: int = 10) -> str:
    """Create a dataset of different encoded chats, and return its id."""
    source = chats(*(chat('u', f'answer {i}') for i in range(count)))
    return (await service.create(source, set_template(model), ENCODE)).dataset_id


async def test_batches_contain_labels_and_cursors(service: RunningData, dataset_id: str) -> None:
    """Features contain int32 tokens and labels, each batch has its cursor, and the last message only marks the end."""
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


async def test_every_cursor_continues_the_same_sequence(service: RunningData, dataset_id: str) -> None:
    """A stream that resumes after any batch of two shuffled epochs gives the remaining batches in the same order."""
    loader = await service.open(dataset_id, 3, shuffle_seed=7, epoch_count=2)
    items = [item async for item in service.stream(start(loader.loader_id), credits_for(64))]
    whole = [ids_of(item) for item in items[:-1]]
    assert whole[:4] != whole[4:]
    first, second = ([ids for batch in epoch for ids in batch] for epoch in (whole[:4], whole[4:]))
    assert sorted(first) == sorted(second)
    assert [item.epoch for item in items[:-1]] == [0, 0, 0, 0, 1, 1, 1, 1]
    for index, item in enumerate(items[:-1]):
        assert await service.read_all(loader.loader_id, item.cursor) == whole[index + 1 :]


async def test_cursor_is_valid_after_a_restart_and_for_another_loader(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """A cursor is valid for its loader after a restart, and for a new loader of the same rows in the same order."""
    fields = {'base_models': (str(tiny_llama_dir),)}
    async with serving_data(tmp_path, **fields) as service:
        dataset_id = await make_dataset(service, tiny_llama_dir)
        loader = await service.open(dataset_id, 3, shuffle_seed=1)
        items = [item async for item in service.stream(start(loader.loader_id), credits_for(64))]
    async with serving_data(tmp_path, **fields) as service:
        new_loader = await service.open(await make_dataset(service, tiny_llama_dir), 3, shuffle_seed=1)
        expected = [ids_of(item) for item in items[1:-1]]
        assert await service.read_all(loader.loader_id, items[0].cursor) == expected
        assert await service.read_all(new_loader.loader_id, items[0].cursor) == expected


async def test_cursor_of_another_loader_is_refused(service: RunningData, dataset_id: str) -> None:
    """A cursor is refused by a loader with another batch size or order, and if its count was changed."""
    first = await service.open(dataset_id, 2)
    items = [item async for item in service.stream(start(first.loader_id), credits_for(1))]
    cursor = items[0].cursor
    forged = dataset_pb2.Cursor(consumed_rows=4, state=cursor.state)
    others = [(await service.open(dataset_id, 3), cursor), (await service.open(dataset_id, 2, shuffle_seed=1), cursor)]
    for loader, invalid in [*others, (first, forged), (first, dataset_pb2.Cursor(consumed_rows=-1))]:
        refused = await refusal_of(service.stream(start(loader.loader_id, invalid)))
        assert (refused.code, refused.field.split('.')[1]) == ('INVALID_ARGUMENT', 'cursor')


async def test_slow_reader_gets_no_more_than_its_credits(service: RunningData, dataset_id: str) -> None:
    """The service sends no batch without a credit."""
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
        # Another call completes in the meantime, so the service has had time to send an extra batch.
        request = dataset_wire.GetDatasetRequest(dataset_id=dataset_id)
        await service.datasets.GetDataset(request, metadata=service.metadata)
        assert not extra.done()
        await call.write(credits_for(1))
        assert (await extra).cursor.consumed_rows == received + 1
        received += 1
    call.cancel()


async def test_reader_that_closes_early_receives_its_batches(service: RunningData, dataset_id: str) -> None:
    """A reader that closes its side early receives the batches for its credits, without an end message."""
    loader = await service.open(dataset_id, 2)
    items = [item async for item in service.stream(start(loader.loader_id), credits_for(2))]
    assert [item.is_end for item in items] == [False, False]


async def test_last_partial_batch_can_be_omitted(service: RunningData, dataset_id: str) -> None:
    """Every batch is full if the last partial batch is omitted, and the batch count does not include it."""
    loader = await service.open(dataset_id, 4, is_last_partial_dropped=True, epoch_count=2)
    assert loader.batch_count == 2
    assert [len(batch) for batch in await service.read_all(loader.loader_id)] == [4, 4, 4, 4]


async def test_loader_without_batches_ends_immediately(service: RunningData, dataset_id: str) -> None:
    """A loader with unlimited epochs finishes immediately if no batch is full and partial batches are omitted."""
    loader = await service.open(dataset_id, 11, is_last_partial_dropped=True, epoch_count=0)
    assert loader.batch_count == 0
    assert await service.read_all(loader.loader_id) == []


async def test_packed_rows_have_positions_that_restart(service: RunningData, tiny_llama_dir: Path) -> None:
    """The positions of a packed row restart at each sample; the chats of a packed row cannot be requested."""
    source = chats(*(chat('u', 'a' * i) for i in range(8)))
    dataset = await service.create(source, set_template(tiny_llama_dir, max_length=120), ENCODE, PACK)
    loader = await service.open(dataset.dataset_id, dataset.row_count)
    items = [item async for item in service.stream(start(loader.loader_id), credits_for(1))]
    starts = [ints_of(feature.position_ids).count(0) for feature in items[0].batch.features]
    assert sum(starts) == 8
    refused = await refusal_of(service.stream(start(loader.loader_id, is_trajectory_included=True)))
    assert refused.field == 'start.is_trajectory_included'


async def test_batches_include_chats_on_request(service: RunningData, tiny_llama_dir: Path) -> None:
    """If the reader requests it, a batch includes the chat of each row, with its tool calls and user data."""
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
    """A stream with messages that are empty, out of order or out of range is refused with a reason or field."""
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
async def test_invalid_loader_is_refused_by_field(service: RunningData, fields: dict[str, Any], field: str) -> None:
    """A request with an invalid field is refused with the path of that field."""
    values = {'request_id': 'r', 'dataset_id': 'ds-x', 'batch_size': 1, **fields}
    request = wire.OpenLoaderRequest(**values)
    refused = await refusal_of(service.loaders.OpenLoader(request, metadata=service.metadata))
    assert (refused.code, refused.field) == ('INVALID_ARGUMENT', field)


async def test_only_encoded_datasets_are_loaded(service: RunningData) -> None:
    """A loader of a dataset that is not encoded is refused."""
    dataset = await service.create(rows({'x': 1}))
    refused = await refusal_of(service.open(dataset.dataset_id, 1))
    assert (refused.code, refused.reason) == ('FAILED_PRECONDITION', 'DATASET_NOT_READY')


async def test_open_loader_prevents_changes_of_its_dataset(service: RunningData, dataset_id: str) -> None:
    """A dataset with an open loader cannot be changed or deleted until the loader is closed."""
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


async def test_loader_of_another_tenant_is_not_found(service: RunningData, dataset_id: str) -> None:
    """A tenant cannot read or close the loader of another tenant."""
    loader = await service.open(dataset_id, 5)
    bob = service.as_tenant('bob')
    refused = await refusal_of(bob.stream(start(loader.loader_id), credits_for(1)))
    assert (refused.code, refused.reason) == ('NOT_FOUND', 'LOADER_NOT_FOUND')
    await bob.loaders.CloseLoader(wire.CloseLoaderRequest(loader_id=loader.loader_id), metadata=bob.metadata)
    assert len(await service.read_all(loader.loader_id)) == 2


async def test_repeated_request_opens_one_loader(service: RunningData, dataset_id: str) -> None:
    """A repeated request returns the same loader; the same request id with other content is refused."""
    first, second = [await service.open(dataset_id, 2, request_id='r') for _ in range(2)]
    assert first == second
    assert (await refusal_of(service.open(dataset_id, 3, request_id='r'))).reason == 'REQUEST_ID_REUSED'


async def test_cancelled_readers_do_not_affect_others(service: RunningData, dataset_id: str) -> None:
    """A new loader of a dataset can be read after readers of another loader have cancelled their streams."""
    loader = await service.open(dataset_id, 1, epoch_count=0)
    for _ in range(20):
        call = service.loaders.StreamBatches(metadata=service.metadata)
        await call.write(start(loader.loader_id))
        await call.write(credits_for(64))
        await call.read()
        call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await call.read()
    new_loader = await service.open(dataset_id, 10)
    batches = await service.read_all(new_loader.loader_id)
    assert np.shape(batches)[:2] == (1, 10)
