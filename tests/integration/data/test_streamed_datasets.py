"""Streamed datasets of the data service: rows are read from a hub by each loader, and cursors stay exact."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fixtures.data_service import (
    ENCODE,
    PACK,
    RunningData,
    credits_for,
    ids_of,
    map_with,
    new_request_id,
    refusal_of,
    rows,
    serving_data,
    set_template,
    start,
)
from fixtures.fake_hub import FakeHub, running_hub
from twinkle.api.data.v1 import dataset_pb2, dataset_service_pb2
from twinkle_services.data.backends.hub_rows import HubAccess
from twinkle_services.data.backends.library import MAX_INSPECTIONS, LibraryEngine
from twinkle_services.data.domain import DecodedBytes, DecodedLimits, HubSource
from twinkle_services.kit.worker import Threads

pytestmark = pytest.mark.timeout(400)  # each dataset and each iteration start a process, which imports libraries

NAME = 'org/chats'
TEXTS = ('a', 'two words', 'and three words', 'four', 'five and no more')
MAP = map_with('SelfCognitionProcessor', model_name='m', model_author='us')


def lines_of(*texts: str) -> bytes:
    """Return rows that `MAP` converts to chats, as JSON lines."""
    return b''.join(json.dumps({'query': 'who?', 'response': text}).encode() + b'\n' for text in texts)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A hub with a dataset; this process and the processes that it starts use the hub."""
    with running_hub() as running:
        running.files[NAME], running.is_private[NAME] = {'train.jsonl': lines_of(*TEXTS)}, False
        settings = {'HF_ENDPOINT': running.url, 'HF_TOKEN': 'hf_right', 'HF_HOME': str(tmp_path / 'hf')}
        for name, value in {**settings, 'TWINKLE_HUB_DIR': ''}.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
async def service(tmp_path: Path, tiny_llama_dir: Path, hub: FakeHub) -> AsyncIterator[RunningData]:
    """A data service that may read the folder of the tiny model."""
    async with serving_data(tmp_path / 'state', base_models=(str(tiny_llama_dir),)) as running:
        yield running


def hub_source(dataset_id: str = f'hf://{NAME}', **fields: Any) -> dataset_pb2.DatasetSource:
    return dataset_pb2.DatasetSource(hub=dataset_pb2.HubSource(dataset_id=dataset_id, **fields))


async def create(service: RunningData, source: Any, *steps: Any, **fields: Any) -> dataset_pb2.Dataset:
    """Create a streamed dataset and return it."""
    fields = {'is_streamed': True, **fields}
    request = dataset_service_pb2.CreateDatasetRequest(
        request_id=new_request_id(), source=source, steps=steps, **fields
    )
    return (await service.datasets.CreateDataset(request, metadata=service.metadata)).dataset


async def refused_field(service: RunningData, loader: dataset_pb2.Loader, consumed_rows: int) -> str:
    """Return the field that the error for a position names; the error can follow only after some rows were read."""
    cursor = dataset_pb2.Cursor(consumed_rows=consumed_rows)
    while True:
        refused = await refusal_of(service.stream(start(loader.loader_id, cursor), credits_for(1)))
        if refused.reason != 'POSITION_NOT_REACHED':
            return refused.field


async def test_every_cursor_of_a_stream_is_exact(service: RunningData, hub: FakeHub, tiny_llama_dir: Path) -> None:
    """A stream yields the batches of an eager dataset from every cursor, even after a commit that changes the rows."""
    steps = [MAP, set_template(tiny_llama_dir), ENCODE]
    eager = await service.create(rows(*({'query': 'who?', 'response': text} for text in TEXTS)), *steps)
    dataset = await create(service, hub_source(), *steps)
    assert (dataset.is_streamed, dataset.is_encoded, dataset.row_count) == (True, True, 0)
    assert list(dataset.columns) == ['query', 'response']
    loaders = [await service.open(item.dataset_id, 2, epoch_count=2) for item in (eager, dataset)]
    assert loaders[1].batch_count == 0
    whole = await service.read_all(loaders[0].loader_id)
    items = [item async for item in service.stream(start(loaders[1].loader_id), credits_for(64))]
    assert [ids_of(item) for item in items[:-1]] == whole
    assert [item.epoch for item in items] == [0, 0, 0, 1, 1, 1, 1]
    hub.commits += 1
    hub.revisions.clear()
    for index in (1, 4):
        assert await service.read_all(loaders[1].loader_id, items[index].cursor) == whole[index + 1 :]
    assert set(hub.revisions) == {'0' * 40}
    # A position without a digest, as in a checkpoint, and one beyond the end.
    assert await service.read_all(loaders[1].loader_id, dataset_pb2.Cursor(consumed_rows=7)) == whole[4:]
    assert await refused_field(service, loaders[1], 10**15) == 'start.cursor.consumed_rows'


async def test_steps_may_change_the_number_of_rows(service: RunningData, tiny_llama_dir: Path) -> None:
    """Slices, filters and packing apply to a stream while it is read, in the order of the shuffled epochs."""
    template = set_template(tiny_llama_dir, max_length=64)
    short = dataset_pb2.DatasetStep(
        filter=dataset_pb2.FilterStep(filter='TextLengthFilter', init_args={'column': 'response', 'max_characters': 12})
    )
    dataset = await create(service, hub_source(begin_row=1), short, MAP, template, ENCODE)
    loader = await service.open(dataset.dataset_id, 1, shuffle_seed=3, epoch_count=2)
    batches = await service.read_all(loader.loader_id)
    assert len(batches) == 4
    assert sorted(batches[:2]) == sorted(batches[2:])
    packed = await create(service, hub_source(), MAP, template, ENCODE, PACK)
    whole = await service.read_all((await service.open(packed.dataset_id, 1)).loader_id)
    assert 1 <= len(whole) < len(TEXTS)


async def mixture(service: RunningData, *parts: dataset_pb2.Dataset, **fields: Any) -> dataset_pb2.Dataset:
    """Create an interleaved mixture of datasets and return it."""
    source = dataset_pb2.MixtureSource(dataset_ids=[part.dataset_id for part in parts], is_interleaved=True)
    return await create(service, dataset_pb2.DatasetSource(mixture=source), **fields)


async def test_mixtures_of_streams_equal_those_of_stored_rows(service: RunningData, tiny_llama_dir: Path) -> None:
    """Mixed streams with different steps yield the batches of eager datasets, even after the parts are deleted."""
    encoding = [set_template(tiny_llama_dir), ENCODE]
    texts = [{'query': 'who?', 'response': text} for text in TEXTS]
    other = map_with('SelfCognitionProcessor', model_name='other', model_author='them')
    eager = [await service.create(rows(*texts), MAP), await service.create(rows(*texts[3:]), other)]
    parts = [await create(service, hub_source(), MAP), await create(service, hub_source(begin_row=3), other)]
    mixed = [await mixture(service, *eager, is_streamed=False), await mixture(service, *parts)]
    mixed = [await service.apply(item.dataset_id, *encoding) for item in mixed]
    assert (mixed[1].is_streamed, list(mixed[1].columns)) == (True, ['query', 'response'])
    for part in parts:
        request = dataset_service_pb2.DeleteDatasetRequest(dataset_id=part.dataset_id)
        await service.datasets.DeleteDataset(request, metadata=service.metadata)
    loaders = [await service.open(item.dataset_id, 2) for item in mixed]
    whole = await service.read_all(loaders[0].loader_id)
    items = [item async for item in service.stream(start(loaders[1].loader_id), credits_for(64))]
    assert [ids_of(item) for item in items[:-1]] == whole
    assert await service.read_all(loaders[1].loader_id, items[1].cursor) == whole[2:]
    shown = dataset_service_pb2.PeekRowsRequest(dataset_id=mixed[1].dataset_id, begin_row=1, row_count=9)
    found = await service.datasets.PeekRows(shown, metadata=service.metadata, timeout=300)
    assert len(found.rows) == 6


async def test_wrong_mixtures_of_streams_are_refused(service: RunningData, tiny_llama_dir: Path) -> None:
    """Parts that are stored, mixed or encoded, and too many parts, are refused; the error names the field."""
    part, stored = await create(service, hub_source()), await service.create(rows({'x': 1}))
    mixed = await mixture(service, part, part)
    encoded = await create(service, hub_source(), MAP, set_template(tiny_llama_dir), ENCODE)
    for parts in ((part, stored), (part, mixed), (part, encoded), (part,) * 5):
        assert (await refusal_of(mixture(service, *parts))).field == 'source.mixture.dataset_ids'
    assert (await refusal_of(mixture(service, part, part, is_streamed=False))).field == 'is_streamed'
    assert (await refusal_of(mixture(service, stored, stored))).field == 'is_streamed'


async def test_a_loader_continues_without_reading_the_hub_again(
    service: RunningData, hub: FakeHub, tiny_llama_dir: Path
) -> None:
    """Successive calls that each read one batch share one iteration over the files."""
    dataset = await create(service, hub_source(), MAP, set_template(tiny_llama_dir), ENCODE)
    loader = await service.open(dataset.dataset_id, 1)
    whole = await service.read_all(loader.loader_id)
    before, cursor, found = len(hub.reads), None, []
    for _ in whole:
        [item] = [item async for item in service.stream(start(loader.loader_id, cursor), credits_for(1))]
        cursor = item.cursor
        found.append(ids_of(item))
    assert found == whole
    assert len(hub.reads) - before <= before


async def test_bad_rows_and_wrong_requests_are_refused(
    service: RunningData, hub: FakeHub, tiny_llama_dir: Path
) -> None:
    """An invalid row names its index; other sources, exports, unknown datasets and wrong cursors are refused."""
    hub.files[NAME]['train.jsonl'] += b'{"query": 1, "response": null}\n'
    dataset = await create(service, hub_source(), MAP, set_template(tiny_llama_dir), ENCODE)
    loader = await service.open(dataset.dataset_id, 2)
    failed = await refusal_of(service.stream(start(loader.loader_id), credits_for(64)))
    assert (failed.code, failed.field) == ('INVALID_ARGUMENT', 'rows[5].query')
    assert await refused_field(service, loader, 1) == 'start.cursor.consumed_rows'
    unknown = await refusal_of(create(service, hub_source('hf://org/absent')))
    assert (unknown.code, unknown.reason) == ('NOT_FOUND', 'HUB_ID_NOT_FOUND')
    assert (await refusal_of(create(service, hub_source(split='dev')))).field == 'source.hub'
    assert (await refusal_of(create(service, rows({'x': 1})))).field == 'is_streamed'
    assert (await refusal_of(create(service, hub_source(), is_lazy=True))).field == 'is_lazy'
    request = dataset_service_pb2.ExportDatasetRequest(
        dataset_id=dataset.dataset_id, format=dataset_pb2.FILE_FORMAT_JSONL
    )
    assert (await refusal_of(service.datasets.ExportDataset(request, metadata=service.metadata))).field == 'dataset_id'


async def test_rows_of_a_stream_are_shown(service: RunningData, tiny_llama_dir: Path) -> None:
    """PeekRows applies the steps of a stream and returns its rows, starting at the requested index."""
    dataset = await create(service, hub_source(), MAP, set_template(tiny_llama_dir), ENCODE)
    request = dataset_service_pb2.PeekRowsRequest(dataset_id=dataset.dataset_id, begin_row=3, row_count=9)
    shown = (await service.datasets.PeekRows(request, metadata=service.metadata)).rows
    assert [row.index for row in shown] == [3, 4]
    assert all(row.feature.input_ids.shape for row in shown)


async def test_files_that_need_too_much_memory_are_refused(tmp_path: Path) -> None:
    """A small file that contains 6 GB of text is refused; the service keeps running, and the error names the limit."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 6000, pa.int32()), pa.array(['x' * (1 << 20)]))
    pq.write_table(pa.table({'text': texts}), tmp_path / 'rows.parquet', store_schema=False, row_group_size=6000)
    async with serving_data(tmp_path / 'state', local_roots=(tmp_path,)) as service:
        refused = await refusal_of(create(service, hub_source(str(tmp_path / 'rows.parquet'))))
        assert (refused.code, refused.field) == ('INVALID_ARGUMENT', 'source.hub')
        assert 'bytes of memory' in refused.message


async def test_files_outside_of_a_repository_are_refused(service: RunningData, hub: FakeHub, tmp_path: Path) -> None:
    """The README of a repository cannot make the service read files of its machine."""
    secret = tmp_path / 'secret.jsonl'
    secret.write_bytes(lines_of('secret'))
    hub.files[NAME]['README.md'] = f'---\nconfigs:\n- config_name: default\n  data_files: {secret}\n---\n'.encode()
    refused = await refusal_of(create(service, hub_source()))
    assert (refused.code, refused.field) == ('INVALID_ARGUMENT', 'source.hub')


async def test_byte_order_mark_before_configs_is_skipped(service: RunningData, hub: FakeHub) -> None:
    """A README with a byte order mark defines the files of a stream."""
    readme = '---\nconfigs: [{config_name: main, data_files: other.jsonl}]\n---\n'
    hub.files[NAME] |= {'README.md': readme.encode('utf-8-sig'), 'other.jsonl': lines_of('other')}
    dataset = await create(service, hub_source(), MAP)
    request = dataset_service_pb2.PeekRowsRequest(dataset_id=dataset.dataset_id, row_count=9)
    (row,) = (await service.datasets.PeekRows(request, metadata=service.metadata)).rows
    assert 'other' in str(row)


def engine_of_hubs() -> LibraryEngine:
    """Return an engine that reads only streamed datasets of hubs."""
    limits = DecodedLimits(rows=10, dataset_bytes=1 << 30, tenant_bytes=1 << 30, total_bytes=1 << 30)
    return LibraryEngine(
        Threads('unused', count=1), base_models=(), access=HubAccess(), template_cache=1, download_limit_bytes=1,
        decoded=DecodedBytes(limits),
    )  # fmt: skip


async def test_cancelled_calls_wait_for_their_process(hub: FakeHub) -> None:
    """A cancelled call returns only after its process has ended, so that processes do not accumulate."""
    engine = engine_of_hubs()
    hub.delay_seconds = 300.0
    finding = asyncio.create_task(engine.find_stream(HubSource(dataset_id=f'hf://{NAME}')))
    await asyncio.to_thread(hub.asked.wait)
    finding.cancel()
    await asyncio.wait([finding], timeout=0.1)
    assert not finding.done()
    hub.stopped.set()
    with pytest.raises(asyncio.CancelledError):
        await finding


async def test_processes_of_calls_are_limited(hub: FakeHub) -> None:
    """Calls that create streamed datasets have a limited number of processes; further calls wait and succeed."""
    engine = engine_of_hubs()
    hub.delay_seconds = 300.0
    finding = [
        asyncio.create_task(engine.find_stream(HubSource(dataset_id=f'hf://{NAME}')))
        for _ in range(MAX_INSPECTIONS + 2)
    ]
    await asyncio.to_thread(hub.asked.wait)
    readers = [child for child in psutil.Process().children() if any('hub_process' in word for word in child.cmdline())]
    assert len(readers) == MAX_INSPECTIONS
    hub.stopped.set()
    assert {found.columns for found in await asyncio.gather(*finding)} == {('query', 'response')}


async def test_token_is_not_used_for_repositories_that_moved(
    tmp_path: Path, hub: FakeHub, tiny_llama_dir: Path
) -> None:
    """A repository that moved is refused unless it is public, and is never read with the token of its old name."""
    hub.files['other/place'], hub.moved = hub.files.pop(NAME), {NAME: 'other/place'}
    hub.is_private['other/place'] = True
    model = str(tiny_llama_dir)
    async with serving_data(tmp_path / 'state', base_models=(model,), hub_token_repositories=(NAME,)) as service:
        refused = [
            await refusal_of(create(service, hub_source())),
            await refusal_of(service.create(hub_source())),
            await refusal_of(service.create(rows({'x': 1}), set_template(NAME))),
        ]
        assert [item.field for item in refused] == ['source.hub', 'source.hub', 'steps[0].set_template']
        assert all('other/place' in item.message for item in refused)
        hub.is_private['other/place'] = False
        dataset = await create(service, hub_source(), MAP, set_template(tiny_llama_dir), ENCODE)
        loader = await service.open(dataset.dataset_id, 2)
        assert list(dataset.columns) == ['query', 'response']
        assert len(await service.read_all(loader.loader_id)) == 3
    assert hub.authorized == []
