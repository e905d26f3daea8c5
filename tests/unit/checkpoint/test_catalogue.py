"""Tests of the catalogue, its change log, keys, the order of frames, exclusive changes and announcements."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_services.checkpoint.application.announcements import Announcements
from twinkle_services.checkpoint.application.exclusive import Exclusive
from twinkle_services.checkpoint.domain import (
    AdapterKey,
    AdapterVersion,
    Catalogue,
    ChangeLog,
    Checkpoint,
    CheckpointExists,
    CheckpointKey,
    parse_checkpoint_path,
)
from twinkle_services.kit.errors import AdapterNotFound, CheckpointNotFound, Draining, StreamOutOfOrder
from twinkle_services.kit.weights import FrameKind, Transfer

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = CheckpointKey(AdapterKey('alice', 'ad-1'), 'final')


def make_checkpoint(key: CheckpointKey = KEY, *, digest: str = 'd', expire_time: datetime | None = None) -> Checkpoint:
    return Checkpoint(
        key=key,
        base_model='m',
        is_optimizer_included=False,
        size_bytes=1,
        digest=digest,
        step_count=0,
        folder='',
        create_time=NOW,
        expire_time=expire_time,
    )


def make_catalogue(*checkpoints: Checkpoint) -> Catalogue:
    catalogue = Catalogue(ring_capacity=2, pin_limit=2)
    catalogue.restore(checkpoints)
    return catalogue


def test_lookups_are_by_tenant() -> None:
    """Another tenant cannot find a checkpoint by the same name."""
    catalogue = make_catalogue(make_checkpoint())
    assert catalogue.checkpoint(KEY, now=NOW) == make_checkpoint()
    with pytest.raises(CheckpointNotFound):
        catalogue.checkpoint(CheckpointKey(AdapterKey('bob', 'ad-1'), 'final'), now=NOW)
    assert catalogue.checkpoints('bob', adapter_id='', now=NOW) == []
    with pytest.raises(AdapterNotFound):
        catalogue.ring(KEY.adapter)


def test_expired_checkpoint_may_be_overwritten() -> None:
    """An expired checkpoint may be overwritten, and `find` still returns it."""
    catalogue = make_catalogue(make_checkpoint(expire_time=NOW + timedelta(seconds=1)))
    with pytest.raises(CheckpointExists):
        catalogue.match_checkpoint(KEY, 'other', is_overwrite_allowed=False, now=NOW)
    later = NOW + timedelta(seconds=1)
    assert catalogue.match_checkpoint(KEY, 'other', is_overwrite_allowed=False, now=later) is None
    assert catalogue.is_expired(KEY, now=later)
    assert catalogue.find(KEY) is not None


@pytest.mark.parametrize('is_overwrite_allowed', [True, False])
def test_repeated_request_finds_its_checkpoint(*, is_overwrite_allowed: bool) -> None:
    """A repeated request finds its checkpoint; a different request or state needs permission to overwrite it."""
    catalogue = make_catalogue(replace(make_checkpoint(), request_id='ad-1:5:f'))

    def match(request_id: str, digest: str = 'd') -> Checkpoint | None:
        return catalogue.match_checkpoint(
            KEY, digest, is_overwrite_allowed=is_overwrite_allowed, now=NOW, request_id=request_id
        )

    assert match('ad-1:5:f') == match('') == catalogue.find(KEY)
    for request_id, digest in (('ad-1:6:f', 'd'), ('ad-1:5:f', 'other')):
        if is_overwrite_allowed:
            assert match(request_id, digest) is None
        else:
            with pytest.raises(CheckpointExists):
                match(request_id, digest)


def test_restore_returns_the_versions_beyond_the_capacity() -> None:
    """If the ring's capacity was reduced, `restore` returns the versions that no longer fit."""
    versions = [
        AdapterVersion(adapter=KEY.adapter, version=n, digest='d', size_bytes=1, is_pinned=n == 1, create_time=NOW)
        for n in (4, 2, 1, 3, 5)
    ]
    catalogue = Catalogue(ring_capacity=2, pin_limit=2)
    evicted = catalogue.restore(versions)
    assert sorted(version.version for version in evicted) == [2, 3]
    assert [version.version for version in catalogue.ring(KEY.adapter).all_newest_first()] == [5, 4, 1]


@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40),
    limit=st.integers(0, 4),
    polls=st.sets(st.integers(0, 39)),
)
def test_a_follower_has_the_current_state(steps: list[tuple[int, bool]], limit: int, polls: set[int]) -> None:
    """A follower that polls at any time, and starts again if the log is incomplete, has the current state."""
    log = ChangeLog(deletion_limit=limit)
    expected: set[str] = set()
    followed: set[str] = set()
    seen = 0
    for index, (number, is_deletion) in enumerate(steps):
        key = replace(KEY, name=f'n{number}')
        log.record(key, is_deletion=is_deletion)
        (expected.discard if is_deletion else expected.add)(key.name)
        if index in polls or index == len(steps) - 1:
            if not log.is_complete_after(seen):
                followed, seen = set(), 0
            for change in log.after(seen):
                (followed.discard if change.is_deletion else followed.add)(change.key.name)
                assert change.revision > seen
            seen = log.revision
            assert followed == expected


def test_revision_of_an_earlier_process_is_refused() -> None:
    """A new log refuses a revision from an earlier process."""
    assert not ChangeLog(deletion_limit=3).is_complete_after(1)


@given(kinds=st.lists(st.sampled_from(FrameKind), max_size=6))
def test_a_transfer_has_header_chunks_and_commit(kinds: list[FrameKind]) -> None:
    """Any order other than header, chunks, commit is refused."""
    is_valid = kinds[:1] == [FrameKind.HEADER] and kinds[-1:] == [FrameKind.COMMIT]
    is_valid = is_valid and set(kinds[1:-1]) <= {FrameKind.CHUNK}
    transfer = Transfer()
    try:
        for kind in kinds:
            transfer.accept(kind)
        transfer.end()
    except StreamOutOfOrder:
        assert not is_valid
    else:
        assert is_valid


@pytest.mark.parametrize('path', ['twinkle://ad-1/weights/final', 'ad-1/weights/final'])
def test_path_and_id_give_the_same_key(path: str) -> None:
    """A checkpoint path gives the same key with and without its scheme."""
    assert parse_checkpoint_path('alice', path) == KEY
    assert KEY.path == 'twinkle://ad-1/weights/final'


@given(path=st.text(max_size=40))
def test_parsing_any_path_is_safe(path: str) -> None:
    """A parsed path is spelled like its key; other text gives no key."""
    key = parse_checkpoint_path('alice', path)
    assert key is None or path in {key.path, key.checkpoint_id}


async def test_changes_of_one_adapter_do_not_overlap() -> None:
    """Changes of different adapters can overlap, and changes of one adapter never overlap."""
    exclusive, running, max_running = Exclusive(), dict[str, int](), dict[str, int]()
    overlap: set[frozenset[str]] = set()

    async def change(name: str) -> None:
        running[name] = running.get(name, 0) + 1
        max_running[name] = max(max_running.get(name, 0), running[name])
        overlap.add(frozenset(key for key, count in running.items() if count))
        await asyncio.sleep(0)
        running[name] -= 1

    calls = [exclusive.run(AdapterKey('alice', name), lambda name=name: change(name)) for name in 'abab']
    await asyncio.gather(*calls)
    assert max_running == {'a': 1, 'b': 1}
    assert frozenset('ab') in overlap


async def test_a_change_is_finished_when_its_caller_is_cancelled() -> None:
    """A change that has started completes before its caller's cancellation takes effect."""
    begun, release, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def change() -> None:
        begun.set()
        await release.wait()
        done.set()

    task = asyncio.create_task(Exclusive().run(KEY.adapter, change))
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()


async def test_announcements_reach_the_watchers_of_their_topic() -> None:
    """An announcement sets the events of all watchers of its topic, and no other events."""
    announcements = Announcements()
    with announcements.watch('a') as first, announcements.watch('a') as second, announcements.watch('b') as other:
        announcements.announce('a')
        assert (first.is_set(), second.is_set(), other.is_set()) == (True, True, False)
        await announcements.wait(first)


async def test_closing_fails_every_wait() -> None:
    """Closing makes current and later waits raise Draining."""
    announcements = Announcements()
    with announcements.watch('a') as changed:
        waiting = asyncio.ensure_future(announcements.wait(changed))
        await asyncio.sleep(0)
        announcements.close()
        with pytest.raises(Draining):
            await waiting
    with announcements.watch('b') as changed, pytest.raises(Draining):
        await announcements.wait(changed)
