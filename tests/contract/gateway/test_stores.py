"""Contract tests of the gateway's stores, for every implementation."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from fixtures.gateway_entries import CHECKPOINT, RUN, SESSION, START
from twinkle_services.gateway.catalogue.rules import CheckpointFilter, RunFilter
from twinkle_services.gateway.credentials import Scope
from twinkle_services.gateway.errors import KeyEnded, SessionFinished
from twinkle_services.gateway.keys.rules import ApiKey, Project, Rotation, Tenant
from twinkle_services.gateway.paging import Cursor, Page
from twinkle_services.gateway.sessions.rules import FinishReason, SessionState

ALL = Page(size=100)
ALICE = Tenant(tenant_id='alice', display_name='Alice', create_time=START)
BOB = Tenant(tenant_id='bob', display_name='Bob', create_time=START)
KEY = ApiKey(
    key_id='key-1',
    tenant_id='alice',
    scopes=frozenset({Scope.TRAIN, Scope.DATA}),
    display_name='laptop',
    create_time=START,
    expire_time=START + timedelta(days=1),
)


@pytest.fixture
async def owned(stores: Any) -> Any:
    """Stores with the tenants alice and bob."""
    for tenant in (ALICE, BOB):
        await stores.tenants.add_if_absent(tenant)
    return stores


async def test_project_is_unique_within_its_tenant(owned: Any) -> None:
    """Two tenants can use the same project id; adding a project again changes nothing."""
    mine = Project(tenant_id='alice', project_id='rl', display_name='Mine', create_time=START)
    other = replace(mine, tenant_id='bob', display_name='Other')
    assert await owned.projects.add_if_absent(mine) == mine
    assert await owned.projects.add_if_absent(other) == other
    assert await owned.projects.add_if_absent(replace(mine, display_name='Again')) == mine
    assert await owned.projects.get('alice', 'rl') == mine
    assert await owned.projects.get('alice', 'sft') is None
    assert (await owned.projects.list_newest('bob', ALL)).items == [other]


async def test_replaced_key_and_its_successor_are_stored_together(owned: Any) -> None:
    """A rotation stores the retired key and its successor; if `rotate` raises an error, nothing changes."""
    await owned.keys.add(KEY, digest=b'a' * 32)
    successor = replace(KEY, key_id='key-2', replaces_key_id='key-1', project_id='rl')
    retired = replace(KEY, retire_time=START + timedelta(hours=1))

    def refuse(key: ApiKey) -> Rotation:
        raise KeyEnded(key.key_id)

    with pytest.raises(KeyEnded):
        await owned.keys.replace('key-1', refuse, digest=b'b' * 32)
    assert await owned.keys.find(b'a' * 32) == KEY
    assert await owned.keys.find(b'b' * 32) is None
    rotation = Rotation(retired=retired, successor=successor)
    assert await owned.keys.replace('key-1', lambda _: rotation, digest=b'b' * 32) == rotation
    assert await owned.keys.find(b'a' * 32) == retired
    assert await owned.keys.find(b'b' * 32) == successor
    assert await owned.keys.replace('key-9', refuse, digest=b'c' * 32) is None


async def test_existing_tenant_is_not_replaced(stores: Any) -> None:
    """Adding a tenant with an existing id returns the existing tenant unchanged."""
    assert await stores.tenants.add_if_absent(ALICE) == ALICE
    assert await stores.tenants.add_if_absent(replace(ALICE, display_name='Other')) == ALICE
    assert await stores.tenants.get('alice') == ALICE
    assert await stores.tenants.get('nobody') is None


async def test_key_is_found_by_its_exact_digest(owned: Any) -> None:
    """A key is returned with all fields for its own digest, and for no other digest."""
    await owned.keys.add(KEY, digest=b'1' * 32)
    assert await owned.keys.find(b'1' * 32) == KEY
    assert await owned.keys.find(b'2' * 32) is None


async def test_only_usable_keys_count_as_valid(owned: Any) -> None:
    """Expired, retired and revoked keys, and keys of other tenants, do not count as valid keys of a tenant."""
    end = START + timedelta(hours=1)
    assert not await owned.keys.has_valid('alice', moment=START)
    lasting = replace(KEY, expire_time=None)
    for number, key in enumerate((replace(KEY, expire_time=end), replace(lasting, retire_time=end), lasting)):
        await owned.keys.add(replace(key, key_id=f'key-{number}'), digest=bytes([number]) * 32)
        assert await owned.keys.has_valid('alice', moment=START)
        assert not await owned.keys.has_valid('bob', moment=START)
        assert await owned.keys.has_valid('alice', moment=end) == (key is lasting)
    await owned.keys.revoke('key-2', moment=START)
    assert await owned.keys.has_valid('alice', moment=START)
    assert not await owned.keys.has_valid('alice', moment=end)


async def test_key_with_known_digest_changes_nothing(owned: Any) -> None:
    """Adding a key with a known digest keeps the existing key, even if this key is revoked."""
    await owned.keys.add(KEY, digest=b'1' * 32)
    await owned.keys.revoke('key-1', moment=START)
    await owned.keys.add(replace(KEY, display_name='again'), digest=b'1' * 32)
    assert await owned.keys.find(b'1' * 32) == replace(KEY, revoke_time=START)


async def test_key_revoked_twice_keeps_the_first_revoke_time(owned: Any) -> None:
    """Revoking a key again keeps its revoke time; revoking an unknown key returns None."""
    await owned.keys.add(KEY, digest=b'1' * 32)
    assert (await owned.keys.revoke('key-1', moment=START)).revoke_time == START
    assert (await owned.keys.revoke('key-1', moment=START + timedelta(hours=1))).revoke_time == START
    assert await owned.keys.revoke('key-9', moment=START) is None


async def test_session_of_the_same_request_is_not_replaced(owned: Any) -> None:
    """A request id creates one session within a tenant, and two tenants can use the same request id."""
    assert await owned.sessions.add_if_absent(SESSION) == SESSION
    assert await owned.sessions.add_if_absent(replace(SESSION, session_id='ses-2')) == SESSION
    foreign = replace(SESSION, session_id='ses-3', tenant_id='bob')
    assert await owned.sessions.add_if_absent(foreign) == foreign


async def test_session_of_another_tenant_is_absent(owned: Any) -> None:
    """A session of another tenant cannot be read or changed."""
    await owned.sessions.add_if_absent(SESSION)
    assert await owned.sessions.get('bob', 'ses-1') is None
    assert await owned.sessions.change('bob', 'ses-1', lambda found: found.finished(FinishReason.FAILED)) is None
    assert await owned.sessions.get('alice', 'ses-1') == SESSION


async def test_refused_change_of_a_session_is_not_stored(owned: Any) -> None:
    """The result of `change` is stored; if `change` raises an error, the error is raised and nothing is stored."""
    await owned.sessions.add_if_absent(SESSION)
    finished = await owned.sessions.change('alice', 'ses-1', lambda found: found.finished(FinishReason.FAILED))
    assert finished == await owned.sessions.get('alice', 'ses-1')
    assert finished.finish_reason is FinishReason.FAILED
    with pytest.raises(SessionFinished):
        await owned.sessions.change('alice', 'ses-1', lambda found: found.with_heartbeat(START))
    assert await owned.sessions.get('alice', 'ses-1') == finished


async def test_only_silent_active_sessions_expire(owned: Any) -> None:
    """Only active sessions without a heartbeat since the given time are marked as expired."""
    fresh = replace(SESSION, session_id='ses-2', request_id='rq-2', heartbeat_time=START + timedelta(hours=1))
    ended = replace(SESSION, session_id='ses-3', request_id='rq-3', state=SessionState.FINISHED)
    for session in (SESSION, fresh, ended):
        await owned.sessions.add_if_absent(session)
    assert await owned.sessions.expire(silent_since=START + timedelta(minutes=1)) == 1
    states = {item.session_id: item.state for item in (await owned.sessions.list_newest('alice', ALL)).items}
    assert states == {
        'ses-1': SessionState.EXPIRED,
        'ses-2': SessionState.ACTIVE,
        'ses-3': SessionState.FINISHED,
    }


async def test_ended_sessions_are_listed_until_they_are_settled(owned: Any) -> None:
    """Ended sessions are listed in pages, the oldest heartbeat first, until they are settled."""
    for number in range(5):
        session = replace(SESSION, session_id=f'ses-{number}', request_id=f'rq-{number}')
        await owned.sessions.add_if_absent(replace(session, heartbeat_time=START + timedelta(minutes=number // 2)))
    assert await owned.sessions.list_unsettled(after=None, size=10) == []
    await owned.sessions.expire(silent_since=START + timedelta(minutes=2))
    await owned.sessions.change('alice', 'ses-4', lambda found: found.finished(FinishReason.SUCCESS))
    first = await owned.sessions.list_unsettled(after=None, size=3)
    assert [item.session_id for item in first] == ['ses-0', 'ses-1', 'ses-2']
    after = Cursor(first[-1].heartbeat_time, first[-1].session_id)
    rest = await owned.sessions.list_unsettled(after=after, size=3)
    assert [item.session_id for item in rest] == ['ses-3', 'ses-4']
    paths = ('twinkle://a/weights/session-expired-1', 'twinkle://b/weights/mine')
    await owned.sessions.change('alice', 'ses-1', lambda found: found.settled(found, paths))
    unsettled = [item.session_id for item in await owned.sessions.list_unsettled(after=None, size=10)]
    assert unsettled == ['ses-0', 'ses-2', 'ses-3', 'ses-4']
    assert (await owned.sessions.get('alice', 'ses-1')).checkpoint_paths == paths
    await owned.sessions.change('alice', 'ses-1', lambda found: found.with_heartbeat(START))
    await owned.sessions.expire(silent_since=START + timedelta(minutes=2))
    unsettled = [item.session_id for item in await owned.sessions.list_unsettled(after=None, size=10)]
    assert unsettled == ['ses-0', 'ses-1', 'ses-2', 'ses-3', 'ses-4']


async def test_run_is_replaced_by_its_last_report(stores: Any) -> None:
    """Saving a run again replaces all fields; counters above 32 bits are preserved."""
    await stores.runs.save(RUN)
    assert await stores.runs.get('alice', 'ad-1') == RUN
    later = replace(RUN, step_count=9, user_metadata={}, update_time=START + timedelta(seconds=1))
    await stores.runs.save(later)
    assert await stores.runs.get('alice', 'ad-1') == later
    assert await stores.runs.get('bob', 'ad-1') is None


async def test_deleted_run_stays_listed(stores: Any) -> None:
    """A deleted run is listed as inactive; marking it again keeps its update time."""
    await stores.runs.save(RUN)
    for hours in (1, 2):
        await stores.runs.mark_deleted(('alice', 'ad-1'), moment=START + timedelta(hours=hours))
    await stores.runs.mark_deleted(('alice', 'unknown'), moment=START)
    deleted = replace(RUN, is_active=False, update_time=START + timedelta(hours=1))
    assert (await stores.runs.list_newest('alice', ALL, RunFilter())).items == [deleted]


async def test_entries_of_two_tenants_can_have_the_same_id(stores: Any) -> None:
    """Two tenants' entries with the same id are stored and marked as deleted independently."""
    theirs, other = replace(RUN, tenant_id='bob', step_count=99), replace(CHECKPOINT, tenant_id='bob', size_bytes=1)
    for run in (RUN, theirs):
        await stores.runs.save(run)
    for checkpoint in (CHECKPOINT, other):
        await stores.checkpoints.save(checkpoint)
    assert (await stores.runs.get('alice', 'ad-1'), await stores.runs.get('bob', 'ad-1')) == (RUN, theirs)
    await stores.runs.mark_deleted(('bob', 'ad-1'), moment=START)
    await stores.checkpoints.mark_deleted(('bob', CHECKPOINT.checkpoint_id), moment=START)
    assert (
        await stores.runs.get('alice', 'ad-1'),
        (await stores.checkpoints.list_newest('alice', ALL, CheckpointFilter())).items,
    ) == (
        RUN,
        [CHECKPOINT],
    )
    await stores.runs.mark_absent_deleted({('bob', 'ad-1')}, moment=START)
    await stores.checkpoints.mark_absent_deleted({('bob', CHECKPOINT.checkpoint_id)}, moment=START)
    assert not (await stores.runs.get('alice', 'ad-1')).is_active
    assert (await stores.checkpoints.list_newest('alice', ALL, CheckpointFilter())).items == []


async def test_runs_absent_from_a_snapshot_are_inactive(stores: Any) -> None:
    """Runs that are absent from a snapshot become inactive, and the other runs are unchanged."""
    await stores.runs.save(RUN)
    await stores.runs.save(replace(RUN, run_id='ad-2'))
    await stores.runs.mark_absent_deleted({('alice', 'ad-2')}, moment=START)
    activity = {run.run_id: run.is_active for run in (await stores.runs.list_newest('alice', ALL, RunFilter())).items}
    assert activity == {'ad-1': False, 'ad-2': True}


async def test_runs_are_listed_by_base_model(stores: Any) -> None:
    """A filter returns the runs of one base model, and an empty filter returns all runs of the tenant."""
    await stores.runs.save(RUN)
    await stores.runs.save(replace(RUN, run_id='ad-2', base_model='large'))
    await stores.runs.save(replace(RUN, run_id='ad-3', tenant_id='bob'))
    assert [
        run.run_id for run in (await stores.runs.list_newest('alice', ALL, RunFilter(base_model='large'))).items
    ] == ['ad-2']
    assert {run.run_id for run in (await stores.runs.list_newest('alice', ALL, RunFilter())).items} == {'ad-1', 'ad-2'}


async def test_deleted_checkpoint_is_not_listed_until_it_is_saved_again(stores: Any) -> None:
    """A deleted checkpoint is not listed; after it is saved again, it is listed with all fields."""
    await stores.checkpoints.save(CHECKPOINT)
    await stores.checkpoints.mark_deleted(('alice', CHECKPOINT.checkpoint_id), moment=START)
    assert (await stores.checkpoints.list_newest('alice', ALL, CheckpointFilter())).items == []
    await stores.checkpoints.save(CHECKPOINT)
    assert (await stores.checkpoints.list_newest('alice', ALL, CheckpointFilter(run_id='ad-1'))).items == [CHECKPOINT]
    assert (await stores.checkpoints.list_newest('alice', ALL, CheckpointFilter(run_id='ad-2'))).items == []
    assert (await stores.checkpoints.list_newest('bob', ALL, CheckpointFilter())).items == []


async def test_checkpoints_absent_from_a_snapshot_are_not_listed(stores: Any) -> None:
    """Checkpoints that are absent from a snapshot are not listed."""
    other = replace(CHECKPOINT, checkpoint_id='ad-1/weights/second', name='second', expire_time=None)
    for checkpoint in (CHECKPOINT, other):
        await stores.checkpoints.save(checkpoint)
    await stores.checkpoints.mark_absent_deleted({('alice', other.checkpoint_id)}, moment=START)
    assert (await stores.checkpoints.list_newest('alice', ALL, CheckpointFilter())).items == [other]


async def _add_tenant(stores: Any, number: int, moment: datetime) -> None:
    await stores.tenants.add_if_absent(Tenant(tenant_id=f'item-{number}', display_name='', create_time=moment))


async def _add_key(stores: Any, number: int, moment: datetime) -> None:
    key = replace(KEY, key_id=f'item-{number}', create_time=moment)
    await stores.keys.add(key, digest=bytes([number]) * 32)


async def _add_session(stores: Any, number: int, moment: datetime) -> None:
    session = replace(SESSION, session_id=f'item-{number}', request_id=f'rq-{number}', create_time=moment)
    await stores.sessions.add_if_absent(session)


async def _add_run(stores: Any, number: int, moment: datetime) -> None:
    await stores.runs.save(replace(RUN, run_id=f'item-{number}', create_time=moment))


async def _add_checkpoint(stores: Any, number: int, moment: datetime) -> None:
    await stores.checkpoints.save(replace(CHECKPOINT, checkpoint_id=f'item-{number}', create_time=moment))


LISTS: dict[str, tuple[Any, Any, str]] = {
    'tenants': (_add_tenant, lambda stores, page: stores.tenants.list_newest(page), 'tenant_id'),
    'keys': (_add_key, lambda stores, page: stores.keys.list_newest('alice', page), 'key_id'),
    'sessions': (_add_session, lambda stores, page: stores.sessions.list_newest('alice', page), 'session_id'),
    'runs': (_add_run, lambda stores, page: stores.runs.list_newest('alice', page, RunFilter()), 'run_id'),
    'checkpoints': (
        _add_checkpoint,
        lambda stores, page: stores.checkpoints.list_newest('alice', page, CheckpointFilter()),
        'checkpoint_id',
    ),
}
"""Functions that add an item and list a page, and the field with the item's id, by store."""


@pytest.mark.parametrize('name', LISTS)
async def test_pages_contain_each_item_once_newest_first(stores: Any, name: str) -> None:
    """Pages of two items cover all items once, ordered by creation time and id, even for equal times."""
    add, list_newest, id_field = LISTS[name]
    if name in {'keys', 'sessions'}:
        await stores.tenants.add_if_absent(ALICE)
    for number in range(7):
        await add(stores, number, START + timedelta(microseconds=number // 3))
    seen = await _read_pages(lambda page: list_newest(stores, page), id_field)
    assert seen == [f'item-{number}' for number in (6, 5, 4, 3, 2, 1, 0)]


async def _read_pages(list_newest: Callable[[Page], Any], id_field: str) -> list[str]:
    seen: list[str] = []
    after = None
    while True:
        found = await list_newest(Page(size=2, after=after))
        assert len(found.items) <= 2
        seen += [getattr(item, id_field) for item in found.items]
        if found.next_cursor is None:
            return seen
        assert found.next_cursor == Cursor(found.items[-1].create_time, seen[-1])
        after = found.next_cursor
