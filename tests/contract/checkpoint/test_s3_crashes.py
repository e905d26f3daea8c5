"""A new store finds the old or the new state after a crash at any request that changes the bucket."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from datetime import UTC, datetime
from typing import IO, Any

import fsspec
import pytest

from fixtures.checkpoint_service import make_state
from fixtures.s3_server import S3Server
from twinkle.checkpoint_engine import PackedState, iter_chunks
from twinkle_services.checkpoint.backends.disk import RemoteDisk, open_disk
from twinkle_services.checkpoint.backends.folder_store import FolderStore
from twinkle_services.checkpoint.domain import AdapterKey, AdapterVersion, VersionKey
from twinkle_services.kit.worker import Threads

KEY = VersionKey(AdapterKey('alice', 'ad-1'), 1)
OLD, NEW = make_state(1, is_trainer_included=True), make_state(2)
PART_BYTES = 8 << 20
"""Size of one part of a multipart upload."""
MAX_OBJECTS = 7
"""Maximum number of objects of a state: record, manifest, digests, two descriptions and two tensor files."""


class Crash(BaseException):
    """Simulates a crash of the process."""


class CrashingBucket(RemoteDisk):
    """A bucket whose client crashes before its n-th change."""

    def __init__(self, url: str, server: S3Server, *, remaining: int) -> None:
        """Allow `remaining` changes before the crash."""
        super().__init__(*fsspec.url_to_fs(url, **server.options))
        self._remaining = remaining

    def _count_change(self) -> None:
        if self._remaining == 0:
            raise Crash
        self._remaining -= 1

    def close_synced(self, file: IO[bytes]) -> None:
        """Complete the upload of an object, or crash before the completion, which leaves no object."""
        self._count_change()
        super().close_synced(file)

    def write(self, name: str, data: bytes) -> None:
        """Put an object, or crash before it is stored."""
        self._count_change()
        super().write(name, data)

    def remove(self, name: str) -> None:
        """Remove the objects one by one; a crash can happen before each object."""
        for below in reversed(self.names(name)):
            self._count_change()
            super().remove(f'{name}/{below}')
        self._count_change()
        super().remove(name)

    def abandon(self, file: IO[bytes]) -> None:
        """Drop the file, as a crash of the process would."""
        _drop(file)


@pytest.mark.parametrize('action', ['commit', 'replace', 'update', 'delete'])
def test_crash_at_any_request_leaves_the_old_or_new_state(s3_server: S3Server, action: str) -> None:
    """A store finds the old or the new state after a crash at any request."""
    asyncio.run(_crash_everywhere(s3_server, action))


def test_parts_of_an_interrupted_upload_are_removed(s3_server: S3Server) -> None:
    """The parts of an interrupted multipart upload are removed at the next start."""
    url = s3_server.new_url()
    disk = open_disk(url, s3_server.options)
    file = disk.open_to_write('states/alice/ad-1/versions/1/st-1/adapter_model.safetensors')
    file.write(bytes(2 * PART_BYTES))
    file.flush()
    _drop(file)
    bucket, _, prefix = url.removeprefix('s3://').partition('/')
    system: Any = fsspec.filesystem('s3', **s3_server.options)
    assert [each['Key'].startswith(prefix) for each in system.list_multipart_uploads(bucket)] == [True]
    threads = Threads('store', count=1)
    assert asyncio.run(FolderStore(disk, threads).load()) == []
    threads.close()
    assert system.list_multipart_uploads(bucket) == []


async def _crash_everywhere(server: S3Server, action: str) -> None:
    threads = Threads('store', count=1)
    seen: list[PackedState | None] = []
    for step in range(100):
        url = server.new_url()
        if action != 'commit':
            await _put(FolderStore(open_disk(url, server.options), threads), OLD)
        is_done = await _completes(_perform(action, FolderStore(CrashingBucket(url, server, remaining=step), threads)))
        await _completes(FolderStore(CrashingBucket(url, server, remaining=step % 3), threads).load())
        seen.append(await _stored_state(FolderStore(open_disk(url, server.options), threads)))
        assert len(_objects(url, server)) <= (MAX_OBJECTS if seen[-1] is not None else 0)
        if is_done:
            break
    threads.close()
    before = None if action == 'commit' else OLD
    after = {'commit': NEW, 'replace': NEW, 'update': OLD, 'delete': None}[action]
    assert [seen[0], seen[-1]] == [before, after]
    assert all(state in (before, after) for state in seen)
    # If a crash leaves the new state, every later crash leaves it too.
    is_old = [state == before for state in seen]
    assert is_old == sorted(is_old, reverse=True)


async def _perform(action: str, store: FolderStore) -> None:
    if action == 'delete':
        await store.delete(KEY)
    elif action == 'update':
        await store.update(replace(_record(OLD), is_pinned=True))
    else:
        await _put(store, NEW)


async def _put(store: FolderStore, state: PackedState) -> None:
    writer = store.begin(KEY, state.manifest)
    try:
        for chunk in iter_chunks(state.data, chunk_bytes=1000):
            await writer.add(chunk)
        await writer.commit(_record(state))
    except Crash:
        for file in writer._files:  # noqa: SLF001 (a crashed process closes no file)
            _drop(file)
        raise


def _drop(file: Any) -> None:
    """Prevent a file from writing its buffer when it is garbage collected."""
    file.closed = True


async def _completes(action: Awaitable[Any]) -> bool:
    try:
        await action
    except Crash:
        return False
    return True


async def _stored_state(store: FolderStore) -> PackedState | None:
    if not await store.load():
        return None
    source = await store.open_state(KEY, is_adapter_only=False)
    data = await source.read(0, source.size_bytes)
    await source.close()
    return PackedState(source.manifest, memoryview(data))


def _objects(url: str, server: S3Server) -> list[str]:
    system: Any = fsspec.filesystem('s3', **server.options)
    system.invalidate_cache()
    return system.find(url)


def _record(state: PackedState) -> AdapterVersion:
    return AdapterVersion(
        adapter=KEY.adapter,
        version=KEY.version,
        digest=state.manifest.digest,
        size_bytes=state.manifest.size_bytes,
        is_pinned=False,
        create_time=datetime(2026, 1, 1, tzinfo=UTC),
    )
