"""Contract tests of the state stores: in memory, on disk, with fsspec, with the S3 API, and in shared memory."""

import io
import random
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest

from fixtures.checkpoint_service import make_state
from fixtures.s3_server import S3Server
from twinkle.checkpoint_engine import PackedState, StateChunk, iter_chunks, unpack_state
from twinkle_services.checkpoint.backends.disk import open_disk
from twinkle_services.checkpoint.backends.folder_store import FolderStore
from twinkle_services.checkpoint.backends.memory_store import MemoryStore
from twinkle_services.checkpoint.backends.memory_tier import MemoryTier
from twinkle_services.checkpoint.backends.segment_cache import SegmentCache
from twinkle_services.checkpoint.domain import (
    AdapterKey,
    AdapterVersion,
    Checkpoint,
    CheckpointKey,
    DamagedState,
    NewestMark,
    VersionKey,
)
from twinkle_services.checkpoint.ports import ByteSource, StateStore
from twinkle_services.kit.errors import (
    CheckpointNotFound,
    ChunkCorrupt,
    DigestMismatch,
    InvalidField,
    StreamOutOfOrder,
    VersionNotFound,
)
from twinkle_services.kit.weights import Segments
from twinkle_services.kit.worker import Threads

ADAPTER = AdapterKey('te/nant', 'ad-1')
VERSION = VersionKey(ADAPTER, 1)
CHECKPOINT = CheckpointKey(ADAPTER, 'final')
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(params=['memory', 'disk', 'fsspec', 's3', 'tier', 'full tier'])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StateStore]:
    """Each implementation of the port."""
    threads = Threads('store', count=2)
    stores = {
        'memory': lambda: MemoryStore(threads),
        'disk': lambda: FolderStore(open_disk(str(tmp_path)), threads),
        'fsspec': lambda: FolderStore(open_disk(f'memory://{uuid4()}'), threads),
        'tier': lambda: _tier(tmp_path, threads, 1 << 20),
        'full tier': lambda: _tier(tmp_path, threads, 0),
        's3': lambda: _s3_store(request.getfixturevalue('s3_server'), threads),
    }
    yield stores[request.param]()
    threads.close()


def _tier(folder: Path, threads: Threads, capacity_bytes: int) -> MemoryTier:
    cache = SegmentCache(Segments(folder / 'memory'), store_url='here', home=folder)
    return MemoryTier(FolderStore(open_disk(str(folder)), threads), cache, threads, capacity_bytes=capacity_bytes)


def _s3_store(server: S3Server, threads: Threads) -> FolderStore:
    return FolderStore(open_disk(server.new_url(), server.options), threads)


def version_record(state: PackedState, key: VersionKey = VERSION) -> AdapterVersion:
    return AdapterVersion(
        adapter=key.adapter,
        version=key.version,
        digest=state.manifest.digest,
        size_bytes=state.manifest.size_bytes,
        is_pinned=False,
        create_time=NOW,
    )


def checkpoint_record(state: PackedState, folder: str) -> Checkpoint:
    return Checkpoint(
        key=CHECKPOINT,
        base_model='org/tiny',
        is_optimizer_included=True,
        size_bytes=state.manifest.size_bytes,
        digest=state.manifest.digest,
        step_count=3,
        folder=folder,
        create_time=NOW,
        expire_time=NOW,
    )


async def put_version(store: StateStore, state: PackedState, key: VersionKey = VERSION) -> AdapterVersion:
    """Commit a state as a version; return its record."""
    writer = store.begin(key, state.manifest)
    for chunk in iter_chunks(state.data, chunk_bytes=1000):
        await writer.add(chunk)
    record = version_record(state, key)
    await writer.commit(record)
    await writer.discard()
    return record


async def put_checkpoint(store: StateStore, state: PackedState) -> Checkpoint:
    """Commit a state as a checkpoint; return its record."""
    writer = store.begin(CHECKPOINT, state.manifest)
    for chunk in iter_chunks(state.data, chunk_bytes=777):
        await writer.add(chunk)
    record = checkpoint_record(state, writer.folder)
    await writer.commit(record)
    return record


async def read_all(source: ByteSource) -> bytes:
    """Return all bytes of a source and close it."""
    data = await source.read(0, source.size_bytes)
    await source.close()
    return data


async def test_committed_states_are_returned_unchanged(store: StateStore) -> None:
    """Bytes, manifests and records of committed versions and checkpoints are returned unchanged."""
    versions, saved = make_state(1), make_state(2, is_trainer_included=True)
    records = [await put_version(store, versions), await put_checkpoint(store, saved)]
    for key, state in ((VERSION, versions), (CHECKPOINT, saved)):
        source = await store.open_state(key, is_adapter_only=False)
        assert (source.manifest, source.size_bytes) == (state.manifest, len(state.data))
        assert await read_all(source) == state.data
    assert sorted(await store.load(), key=str) == sorted(records, key=str)


async def test_adapter_section_is_opened_without_the_trainer_section(store: StateStore) -> None:
    """The adapter section can be opened alone, with a manifest that describes only this section."""
    state = make_state(2, is_trainer_included=True)
    await put_checkpoint(store, state)
    source = await store.open_state(CHECKPOINT, is_adapter_only=True)
    manifest, data = source.manifest, await read_all(source)
    assert unpack_state(manifest, data) == unpack_state(state.manifest, state.data)
    assert not manifest.is_trainer_included
    assert manifest == make_state(2).manifest


async def test_reads_start_and_end_at_any_byte(store: StateStore) -> None:
    """A read may start and end at any byte, and returns fewer bytes only at the end of the state."""
    state = make_state(2, is_trainer_included=True)
    await put_checkpoint(store, state)
    source = await store.open_state(CHECKPOINT, is_adapter_only=False)
    rng = random.Random(0)
    for _ in range(50):
        begin, length = rng.randrange(len(state.data) + 1), rng.randrange(6000)
        assert await source.read(begin, length) == state.data[begin : begin + length]
    await source.close()


async def test_nothing_is_visible_before_the_commit(store: StateStore) -> None:
    """A state is not visible before its commit, and a discarded upload leaves no data."""
    state = make_state(1)
    writer = store.begin(VERSION, state.manifest)
    for chunk in iter_chunks(state.data):
        await writer.add(chunk)
    with pytest.raises(VersionNotFound):
        await store.open_state(VERSION, is_adapter_only=False)
    await writer.discard()
    assert await store.load() == []


async def test_refused_chunks_change_nothing(store: StateStore) -> None:
    """A refused chunk changes nothing: the correct chunk is accepted, and the state is complete."""
    state = make_state(1)
    first, second = iter_chunks(state.data, chunk_bytes=2500)
    writer = store.begin(VERSION, state.manifest)
    with pytest.raises(ChunkCorrupt):
        await writer.add(replace(first, checksum=first.checksum ^ 1))
    with pytest.raises(StreamOutOfOrder):
        await writer.add(second)
    await writer.add(first)
    with pytest.raises(StreamOutOfOrder):
        await writer.add(first)
    with pytest.raises(StreamOutOfOrder):
        await writer.commit(version_record(state))
    with pytest.raises(InvalidField):
        await writer.add(StateChunk(2500, bytes(5000), 0))
    await writer.add(second)
    await writer.commit(version_record(state))
    assert await read_all(await store.open_state(VERSION, is_adapter_only=False)) == state.data


async def test_a_state_with_another_digest_is_not_committed(store: StateStore) -> None:
    """A state whose bytes do not match the announced digest is not committed."""
    announced, sent = make_state(1), make_state(2)
    writer = store.begin(VERSION, announced.manifest)
    for chunk in iter_chunks(sent.data):
        await writer.add(chunk)
    with pytest.raises(DigestMismatch):
        await writer.commit(version_record(announced))
    await writer.discard()
    assert await store.load() == []


async def test_replacing_a_state_keeps_open_sources_readable(store: StateStore) -> None:
    """A source that is opened before a replacement returns the old state."""
    old, new = make_state(1), make_state(2)
    await put_version(store, old)
    source = await store.open_state(VERSION, is_adapter_only=False)
    assert await source.read(0, 10) == old.data[:10]
    await put_version(store, new)
    assert await read_all(source) == old.data
    assert await read_all(await store.open_state(VERSION, is_adapter_only=False)) == new.data
    assert len(await store.load()) == 1


async def test_deleting_a_state_keeps_open_sources_readable(store: StateStore) -> None:
    """A source that is opened before a deletion stays readable, and a second deletion is allowed."""
    state = make_state(1)
    await put_version(store, state)
    source = await store.open_state(VERSION, is_adapter_only=False)
    await store.delete(VERSION)
    await store.delete(VERSION)
    with pytest.raises(VersionNotFound):
        await store.open_state(VERSION, is_adapter_only=False)
    assert await store.load() == []
    assert await read_all(source) == state.data


async def test_updated_records_are_loaded(store: StateStore) -> None:
    """An updated record is loaded with its unchanged state; a record without a state is refused."""
    state = make_state(1)
    record = await put_version(store, state)
    pinned = replace(record, is_pinned=True)
    await store.update(pinned)
    assert await store.load() == [pinned]
    assert await read_all(await store.open_state(VERSION, is_adapter_only=False)) == state.data
    with pytest.raises(VersionNotFound):
        await store.update(replace(record, version=9))


async def test_marks_are_loaded(store: StateStore) -> None:
    """The last recorded `NewestMark` of each adapter is loaded together with the records of all states."""
    other = AdapterKey('te/nant', 'ad-2')
    record = await put_version(store, make_state(1))
    for number in (3, 7):
        await store.mark_newest(NewestMark(ADAPTER, number))
    await store.mark_newest(NewestMark(other, 1))
    await store.delete(VersionKey(ADAPTER, 9))
    found = await store.load()
    assert sorted(found, key=str) == sorted([record, NewestMark(ADAPTER, 7), NewestMark(other, 1)], key=str)


async def test_open_readers_survive_a_deletion_and_a_new_state(store: StateStore) -> None:
    """Two open readers return the old state after its deletion and the publication of a new state."""
    old, new = make_state(1, size_bytes=1 << 16), make_state(2, size_bytes=1 << 16)
    await put_version(store, old)
    first, second = [await store.open_state(VERSION, is_adapter_only=False) for _ in range(2)]
    await store.delete(VERSION)
    await put_version(store, new)
    assert await read_all(first) == old.data
    assert await read_all(second) == old.data
    assert await read_all(await store.open_state(VERSION, is_adapter_only=False)) == new.data
    assert len(await store.load()) == 1


async def test_missing_states_raise_the_error_of_their_kind(store: StateStore) -> None:
    """Opening a missing version or checkpoint raises VersionNotFound or CheckpointNotFound."""
    with pytest.raises(VersionNotFound):
        await store.open_state(VERSION, is_adapter_only=True)
    with pytest.raises(CheckpointNotFound):
        await store.open_state(CHECKPOINT, is_adapter_only=True)
    with pytest.raises(CheckpointNotFound):
        await store.open_archive(checkpoint_record(make_state(1), ''))


async def test_archives_are_the_same_bytes_in_every_store(store: StateStore, tmp_path: Path) -> None:
    """The archive of a checkpoint has the same bytes in every store."""
    state = make_state(3, is_trainer_included=True)
    record = await put_checkpoint(store, state)
    data = await read_all(await store.open_archive(record))
    threads = Threads('store', count=1)
    oracle = MemoryStore(threads)
    await put_checkpoint(oracle, state)
    assert data == await read_all(await oracle.open_archive(record))
    threads.close()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getnames() == ['README.md', 'adapter_config.json', 'adapter_model.safetensors']


@pytest.mark.parametrize('tenant_id', ['..', '.', '../../x', 'a b/c', '%2e%2e', 'é'])
async def test_tenants_have_separate_folders(store: StateStore, tenant_id: str) -> None:
    """Tenant ids that look like paths do not collide with other tenants."""
    keys = [VersionKey(AdapterKey(tenant, 'ad-1'), 1) for tenant in (tenant_id, 'alice')]
    for seed, key in enumerate(keys):
        await put_version(store, make_state(seed), key)
    for seed, key in enumerate(keys):
        assert await read_all(await store.open_state(key, is_adapter_only=False)) == make_state(seed).data
    assert {record.key.adapter.tenant_id for record in await store.load()} == {tenant_id, 'alice'}


@pytest.mark.parametrize('adapter_id', ['0b5c:train:0', 'a' + 127 * ':'], ids=['parts', 'longest'])
async def test_adapter_ids_may_contain_colons(store: StateStore, adapter_id: str) -> None:
    """Adapter ids with colons do not collide with the same ids with dots."""
    keys = [VersionKey(AdapterKey('alice', run), 1) for run in (adapter_id, adapter_id.replace(':', '.'))]
    for seed, key in enumerate(keys):
        await put_version(store, make_state(seed), key)
    for seed, key in enumerate(keys):
        assert await read_all(await store.open_state(key, is_adapter_only=False)) == make_state(seed).data
    assert {record.key.adapter.adapter_id for record in await store.load()} == {key.adapter.adapter_id for key in keys}


async def test_truncated_version_is_dropped_after_a_power_loss(tmp_path: Path) -> None:
    """A version with truncated files is dropped at the next load, and the other versions are kept."""
    threads = Threads('store', count=1)
    store = FolderStore(open_disk(str(tmp_path)), threads)
    await put_version(store, make_state(1))
    intact = await put_version(store, make_state(2), VersionKey(ADAPTER, 2))
    truncated = _only(tmp_path, 'versions/1/*/adapter_model.safetensors')
    truncated.write_bytes(truncated.read_bytes()[:-500])
    assert await FolderStore(open_disk(str(tmp_path)), threads).load() == [intact]
    assert not truncated.parents[1].exists()
    threads.close()


async def test_unreadable_record_does_not_affect_other_states(tmp_path: Path) -> None:
    """An unreadable record stays in place and is reported, and the other states are loaded."""
    threads = Threads('store', count=1)
    store = FolderStore(open_disk(str(tmp_path)), threads)
    await put_version(store, make_state(1))
    intact = await put_version(store, make_state(2), VersionKey(ADAPTER, 2))
    record = _only(tmp_path, 'versions/1/record.json')
    record.write_text('{')
    assert await FolderStore(open_disk(str(tmp_path)), threads).load() == [DamagedState(VERSION), intact]
    assert record.exists()
    threads.close()


async def test_pinning_keeps_the_state(tmp_path: Path) -> None:
    """A version that was written without a sync keeps its state when it is pinned."""
    threads = Threads('store', count=1)
    store = FolderStore(open_disk(str(tmp_path)), threads)
    record = replace(await put_version(store, make_state(1)), is_pinned=True)
    await store.update(record)
    assert await store.load() == [record]
    assert await read_all(await store.open_state(VERSION, is_adapter_only=False)) == make_state(1).data
    threads.close()


def _only(root: Path, pattern: str) -> Path:
    (found,) = root.glob(f'states/*/*/{pattern}')
    return found
