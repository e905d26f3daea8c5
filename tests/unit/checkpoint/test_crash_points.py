"""A crash at every step of a commit, a replacement, an update and a deletion on disk.

The disk of these tests fails at its n-th change, for every n. A new store must then find either the old state or the
new one, and no other files.
"""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from fixtures.checkpoint_service import make_state
from services.checkpoint.backends.disk import LocalDisk, open_disk
from services.checkpoint.backends.folder_store import FolderStore
from services.checkpoint.domain import AdapterKey, AdapterVersion, Record, VersionKey
from services.kit.errors import DomainError
from services.kit.worker import Threads
from twinkle.checkpoint_engine import PackedState, iter_chunks

KEY = VersionKey(AdapterKey('alice', 'ad-1'), 1)


class Crash(BaseException):
    """Simulates a failure of the machine."""


@dataclass
class ChangeCounter:
    """Counts the changes of a disk, and fails at one of them; a negative count never fails."""

    remaining: int = -1
    error_number: int = 0
    """Error of the disk instead of a crash; the disk works again after it."""

    def count_change(self) -> None:
        """Count a change.

        Raises:
            Crash: This change does not happen, nor does any later one.
            OSError: This change does not happen.
        """
        if self.remaining == 0 and not self.error_number:
            raise Crash
        self.remaining -= 1
        if self.remaining == -1 and self.error_number:
            raise OSError(self.error_number, os.strerror(self.error_number))


class TornFile:
    """A file whose last write before the crash writes only half of its bytes."""

    def __init__(self, file: IO[bytes], counter: ChangeCounter) -> None:
        """Write to `file` until the counter reaches its limit."""
        self._file = file
        self._counter = counter

    def write(self, data: Any) -> None:
        """Write all or, at the crash, half of the data."""
        try:
            self._counter.count_change()
        except Crash:
            self._file.write(memoryview(data)[: len(data) // 2])
            self._file.close()
            raise
        self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class CrashingDisk(LocalDisk):
    """A disk that fails at one change."""

    def __init__(self, root: str, counter: ChangeCounter, *, is_synced: bool = True) -> None:
        super().__init__(LocalFileSystem(), root, is_synced=is_synced)
        self._counter = counter

    def unsynced(self) -> 'CrashingDisk':
        return CrashingDisk(self._root, self._counter, is_synced=False)

    def open_to_write(self, name: str) -> Any:
        """Open a file that may be torn."""
        self._counter.count_change()
        return TornFile(super().open_to_write(name), self._counter)

    def close_synced(self, file: IO[bytes]) -> None:
        """Sync, or crash first."""
        try:
            self._counter.count_change()
        except Crash:
            file.close()
            raise
        super().close_synced(file)

    def sync_folder(self, name: str) -> None:
        """Sync, or crash first."""
        self._counter.count_change()
        super().sync_folder(name)

    def remove(self, name: str) -> None:
        """Remove file by file; a crash can happen before each file."""
        top = Path(self.local_path(name))
        for path in sorted(top.rglob('*'), reverse=True) if top.is_dir() else ():
            self._counter.count_change()
            path.rmdir() if path.is_dir() else path.unlink()
        self._counter.count_change()
        super().remove(name)


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

Action = Callable[[FolderStore], Awaitable[None]]
ACTIONS: dict[str, tuple[bool, Action, list[tuple[Record, PackedState] | None]]] = {
    'commit': (False, lambda store: _put(store, NEW), [None, (_record(NEW), NEW)]),
    'replace': (True, lambda store: _put(store, NEW), [(_record(OLD), OLD), (_record(NEW), NEW)]),
    'update': (True, lambda store: store.update(PINNED), [(_record(OLD), OLD), (PINNED, OLD)]),
    'delete': (True, lambda store: store.delete(KEY), [(_record(OLD), OLD), None]),
}
"""Whether the old state exists before the action, the action itself, and the states that may exist after it."""


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
    # The new state stays visible: with later crashes the outcome changes from old to new exactly once.
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] == 1


@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.EIO])
@pytest.mark.parametrize('has_old', [False, True])
async def test_a_disk_error_at_any_step_leaves_the_old_or_the_new(
    tmp_path: Path, number: int, *, has_old: bool
) -> None:
    """The complete old or new state is stored after an error at any step of a commit, as the answer says."""
    threads = Threads('store', count=1)
    counter, step = ChangeCounter(), -1
    while step < 0 or counter.remaining < 0:
        step += 1
        root, counter = tmp_path / str(step), ChangeCounter(step, number)
        if has_old:
            await _put(FolderStore(open_disk(str(root)), threads), OLD)
        is_stored = await _stores_or_discards(FolderStore(CrashingDisk(str(root), counter), threads))
        expected = NEW if is_stored else OLD if has_old else None
        found = await _stored_state(FolderStore(open_disk(str(root)), threads))
        assert found == (None if expected is None else (_record(expected), expected)), f'error at change {step}'
    threads.close()
    assert step > 2


async def _stores_or_discards(store: FolderStore) -> bool:
    """Commit the new state as the service does; return whether that succeeded."""
    writer = store.begin(KEY, NEW.manifest)
    try:
        for chunk in iter_chunks(NEW.data, chunk_bytes=1000):
            await writer.add(chunk)
        await writer.commit(_record(NEW))
    except (OSError, DomainError):
        await writer.discard()
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
    source = await store.open_state(KEY, is_adapter_only=False)
    data = await source.read(0, source.size_bytes)
    await source.close()
    return records[0], PackedState(source.manifest, memoryview(data))


def _assert_clean(root: Path, *, is_empty: bool) -> None:
    """Check that every file belongs to a record."""
    states = root / 'states'
    folders = [path for path in states.glob('*/*/*/*/*') if path.is_dir()]
    records = list(states.glob('*/*/*/*/record.json'))
    unexpected = [path for path in states.glob('*/*/*/*/*') if path.is_file() and path.name != 'record.json']
    assert (len(folders), len(records), unexpected) == ((0, 0, []) if is_empty else (1, 1, []))
