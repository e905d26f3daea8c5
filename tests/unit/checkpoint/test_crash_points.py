"""A crash or a disk error at every step of a commit, a replacement, an update and a deletion on disk.

The disk fails at its n-th change, for every n. A new store must then find either the old state or the new state, and no
other files.
"""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fixtures.checkpoint_service import make_state
from fixtures.failing_disk import ChangeCounter, Crash, CrashingDisk
from twinkle.checkpoint_engine import PackedState, iter_chunks
from twinkle_services.checkpoint.backends.disk import open_disk
from twinkle_services.checkpoint.backends.folder_store import FolderStore
from twinkle_services.checkpoint.domain import AdapterKey, AdapterVersion, Record, VersionKey
from twinkle_services.kit.errors import DomainError, VersionNotFound
from twinkle_services.kit.worker import Threads

KEY = VersionKey(AdapterKey('alice', 'ad-1'), 1)


def _record(state: PackedState) -> AdapterVersion:
    return AdapterVersion(
        adapter=KEY.adapter,
        version=KEY.version,
        digest=state.manifest.digest,
        size_bytes=state.manifest.size_bytes,
        is_pinned=False,
        create_time=datetime(2026, 1, 1, tzinfo=UTC),
    )


async def _put(store: FolderStore, state: PackedState) -> None:
    writer = store.begin(KEY, state.manifest)
    for chunk in iter_chunks(state.data, chunk_bytes=1000):
        await writer.add(chunk)
    await writer.commit(_record(state))


OLD, NEW = make_state(1, is_trainer_included=True), make_state(2)
PINNED = replace(_record(OLD), is_pinned=True)


async def _put_new(store: FolderStore) -> None:
    await _put(store, NEW)


Action = Callable[[FolderStore], Awaitable[None]]
ACTIONS: dict[str, tuple[bool, Action, list[tuple[Record, PackedState] | None]]] = {
    'commit': (False, _put_new, [None, (_record(NEW), NEW)]),
    'replace': (True, _put_new, [(_record(OLD), OLD), (_record(NEW), NEW)]),
    'update': (True, lambda store: store.update(PINNED), [(_record(OLD), OLD), (PINNED, OLD)]),
    'delete': (True, lambda store: store.delete(KEY), [(_record(OLD), OLD), None]),
}
"""Whether the old state exists before the action, the action, and the states that may exist after it."""


@pytest.mark.parametrize('name', ACTIONS)
def test_a_crash_at_any_step_leaves_the_old_or_the_new(tmp_path: Path, name: str) -> None:
    """A store finds the old or the new state after a crash at any step, even with a second crash during recovery."""
    asyncio.run(_crash_everywhere(tmp_path, name))


async def _crash_everywhere(tmp_path: Path, name: str) -> None:
    has_old, action, outcomes = ACTIONS[name]
    threads = Threads('store', count=1)
    seen: list[int] = []
    for step in range(1000):
        root = tmp_path / str(step)
        if has_old:
            await _put(FolderStore(open_disk(str(root)), threads), OLD)
        is_done = await _completes(action(FolderStore(CrashingDisk(str(root), ChangeCounter(step)), threads)))
        await _completes(FolderStore(CrashingDisk(str(root), ChangeCounter(step % 3)), threads).load())
        seen.append(outcomes.index(await _stored_state(FolderStore(open_disk(str(root)), threads))))
        _assert_clean(root, is_empty=outcomes[seen[-1]] is None)
        if is_done:
            break
    threads.close()
    assert step > 2
    # Over all crash steps, the outcome changes exactly once, from the old state to the new one.
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] == 1


@pytest.mark.parametrize('is_late', [False, True])
@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.EIO])
@pytest.mark.parametrize('name', ACTIONS)
async def test_a_disk_error_at_any_step_leaves_the_old_or_the_new(
    tmp_path: Path, name: str, number: int, *, is_late: bool
) -> None:
    """A failed action leaves the complete old state, and a successful action leaves the new state."""
    has_old, action, outcomes = ACTIONS[name]
    threads = Threads('store', count=1)
    counter, step = ChangeCounter(), -1
    while step < 0 or counter.remaining < 0:
        step += 1
        root, counter = tmp_path / str(step), ChangeCounter(step, number, is_late=is_late)
        if has_old:
            await _put(FolderStore(open_disk(str(root)), threads), OLD)
        store = FolderStore(CrashingDisk(str(root), counter), threads)
        expected = outcomes[await _succeeds(_put_or_discard(store) if action is _put_new else action(store))]
        assert await _open_state(store) == (None if expected is None else expected[1]), f'error at change {step}'
        found = await _stored_state(FolderStore(open_disk(str(root)), threads))
        assert found == expected, f'error at change {step}'
        _assert_clean(root, is_empty=expected is None)
    threads.close()
    assert step > 2


async def test_a_deletion_leaves_the_state_that_is_being_written(tmp_path: Path) -> None:
    """A new state is complete after its commit, even if the old state is deleted before the commit."""
    threads = Threads('store', count=1)
    store = FolderStore(open_disk(str(tmp_path)), threads)
    for is_damaged in (False, True):
        await _put(store, OLD)
        writer = store.begin(KEY, NEW.manifest)
        for chunk in iter_chunks(NEW.data, chunk_bytes=1000):
            await writer.add(chunk)
        if is_damaged:
            _record_path(tmp_path).write_bytes(b'{}')
        await store.delete(KEY)
        assert await _open_state(store) is None
        await writer.commit(_record(NEW))
        assert await _open_state(store) == NEW
        _assert_clean(tmp_path, is_empty=False)
    threads.close()


def _record_path(root: Path) -> Path:
    (path,) = root.glob('states/*/*/*/*/record.json')
    return path


async def _put_or_discard(store: FolderStore) -> None:
    """Commit the new state, then discard the writer, as the service does."""
    writer = store.begin(KEY, NEW.manifest)
    try:
        for chunk in iter_chunks(NEW.data, chunk_bytes=1000):
            await writer.add(chunk)
        await writer.commit(_record(NEW))
    finally:
        await writer.discard()


async def _succeeds(action: Awaitable[None]) -> bool:
    try:
        await action
    except (OSError, DomainError):
        return False
    return True


async def _completes(action: Awaitable[Any]) -> bool:
    try:
        await action
    except Crash:
        return False
    return True


async def _stored_state(store: FolderStore) -> tuple[Record, PackedState] | None:
    records = await store.load()
    if not records:
        return None
    state = await _open_state(store)
    assert state is not None
    return records[0], state


async def _open_state(store: FolderStore) -> PackedState | None:
    try:
        source = await store.open_state(KEY, is_adapter_only=False)
    except VersionNotFound:
        return None
    data = await source.read(0, source.size_bytes)
    await source.close()
    return PackedState(source.manifest, memoryview(data))


def _assert_clean(root: Path, *, is_empty: bool) -> None:
    """Check that there is exactly one record with its files, or no file if `is_empty`."""
    states = root / 'states'
    folders = [path for path in states.glob('*/*/*/*/*') if path.is_dir()]
    records = list(states.glob('*/*/*/*/record.json'))
    unexpected = [path for path in states.glob('*/*/*/*/*') if path.is_file() and path.name != 'record.json']
    assert (len(folders), len(records), unexpected) == ((0, 0, []) if is_empty else (1, 1, []))
