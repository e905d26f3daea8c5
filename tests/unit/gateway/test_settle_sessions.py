"""What ended sessions leave behind is looked after: once where all goes well, and in the end where it does not."""

import asyncio
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest

from fixtures.gateway_stores import MemorySessionStore
from services.gateway.sessions.expire_sessions import ExpireSessions
from services.gateway.sessions.ports import ParkedAdapter
from services.gateway.sessions.session import FinishReason, Session, SessionState
from services.gateway.sessions.settle_sessions import SettleSessions
from services.kit.clock import FakeClock
from services.kit.errors import DomainError, ServiceUnreachable

START = datetime(2026, 5, 1, tzinfo=UTC)
LIFETIME = timedelta(minutes=5)
EXPIRED = Session(
    session_id='ses-1',
    tenant_id='alice',
    request_id='rq-1',
    state=SessionState.EXPIRED,
    client='test',
    create_time=START,
    heartbeat_time=START,
)


@dataclass
class Keeper:
    """Model services with adapters of sessions."""

    adapters: dict[str, list[str]] = field(default_factory=lambda: {'ses-1': ['ad-1', 'ad-2']})
    asked: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """Tenant, adapter and prefix of each call."""
    failures: dict[str, DomainError] = field(default_factory=dict[str, DomainError])
    """By adapter."""
    busy: set[str] = field(default_factory=set[str])
    deleted: set[str] = field(default_factory=set[str])

    async def of_session(self, tenant_id: str, session_id: str) -> list[str]:
        """Return a session's adapters."""
        del tenant_id
        return self.adapters.get(session_id, [])

    async def park(self, tenant_id: str, adapter_id: str, *, save_prefix: str) -> ParkedAdapter | None:
        """Note the call."""
        self.asked.append((tenant_id, adapter_id, save_prefix))
        if adapter_id in self.failures:
            raise self.failures[adapter_id]
        if adapter_id in self.deleted:
            return None
        path = f'twinkle://{adapter_id}/weights/{save_prefix}-1' if save_prefix else ''
        return ParkedAdapter(is_at_rest=adapter_id not in self.busy, checkpoint_path=path)


class World:
    """A sweep, and what it works on."""

    def __init__(self) -> None:
        self.sessions, self.keeper = MemorySessionStore(), Keeper()
        self.let_go: list[str] = []
        self.unpinning: DomainError | None = None
        self.settle = SettleSessions(self.sessions, self.keeper, let_go=self.note)

    async def note(self, session: Session) -> None:
        """Let go of a session's versions."""
        if self.unpinning is not None:
            raise self.unpinning
        self.let_go.append(session.session_id)

    async def session(self, session_id: str = 'ses-1') -> Session:
        """Return a session."""
        found = await self.sessions.get('alice', session_id)
        assert found is not None
        return found


async def test_an_expired_session_is_saved_parked_andnote() -> None:
    """Every adapter of it, for its tenant; the session tells where the weights are, and the next sweep does nothing."""
    world = World()
    await world.sessions.add_if_absent(EXPIRED)
    assert await world.settle() == 1
    assert world.keeper.asked == [('alice', name, 'session-expired') for name in ('ad-1', 'ad-2')]
    assert world.let_go == ['ses-1']
    paths = tuple(f'twinkle://{name}/weights/session-expired-1' for name in ('ad-1', 'ad-2'))
    assert (await world.session()).checkpoint_paths == paths
    assert await world.settle() == 0
    assert len(world.keeper.asked) == 2


@pytest.mark.parametrize(
    ('reason', 'prefix'),
    [(FinishReason.SUCCESS, ''), (FinishReason.FAILED, 'session-ended'), (FinishReason.INTERRUPTED, 'session-ended')],
)
async def test_a_finished_session_is_parked_and_saved_unless_all_went_well(reason, prefix) -> None:
    """Whoever says that it is done has saved what it wants."""
    world = World()
    await world.sessions.add_if_absent(replace(EXPIRED, state=SessionState.ACTIVE).finished(reason))
    assert await world.settle() == 1
    assert {item[2] for item in world.keeper.asked} == {prefix}
    assert world.let_go == ['ses-1']


async def test_an_active_session_is_left_alone() -> None:
    """It has its client."""
    world = World()
    await world.sessions.add_if_absent(replace(EXPIRED, state=SessionState.ACTIVE))
    assert await world.settle() == 0
    assert world.keeper.asked == []


@pytest.mark.parametrize('trouble', ['failures', 'busy', 'unpinning'])
async def test_what_cannot_be_done_now_is_done_by_a_later_sweep(trouble) -> None:
    """The other adapters, and other sessions, are looked after meanwhile."""
    world = World()
    world.keeper.adapters['ses-2'] = ['ad-3']
    await world.sessions.add_if_absent(EXPIRED)
    later = START + timedelta(seconds=1)
    other = replace(EXPIRED, session_id='ses-2', request_id='rq-2', heartbeat_time=later)
    await world.sessions.add_if_absent(other)
    if trouble == 'failures':
        world.keeper.failures['ad-1'] = ServiceUnreachable('model')
    if trouble == 'busy':
        world.keeper.busy.add('ad-1')
    if trouble == 'unpinning':
        world.unpinning = ServiceUnreachable('checkpoint')
    assert await world.settle() == (0 if trouble == 'unpinning' else 1)
    assert {item[1] for item in world.keeper.asked} == {'ad-1', 'ad-2', 'ad-3'}
    assert not (await world.session()).is_settled
    world.keeper.failures.clear()
    world.keeper.busy.clear()
    world.unpinning = None
    assert await world.settle() == (2 if trouble == 'unpinning' else 1)
    assert (await world.session()).is_settled


async def test_an_adapter_that_is_never_parked_does_not_keep_what_samplers_had() -> None:
    """A damaged one is tried at every sweep, and the session's versions are let go all the same."""
    world = World()
    world.keeper.failures['ad-1'] = ServiceUnreachable('model')
    await world.sessions.add_if_absent(EXPIRED)
    assert await world.settle() == 0
    assert world.let_go == ['ses-1']


async def test_a_deleted_adapter_holds_nothing_up() -> None:
    """It needs nothing any more."""
    world = World()
    world.keeper.deleted.add('ad-1')
    await world.sessions.add_if_absent(EXPIRED)
    assert await world.settle() == 1
    assert (await world.session()).checkpoint_paths == ('twinkle://ad-2/weights/session-expired-1',)


async def test_a_client_that_comes_back_in_the_middle_stays_active() -> None:
    """What is not parked yet stays, and the session is not marked; when it falls silent again, all is done again."""
    world, park = World(), Keeper.park

    async def come_back(tenant_id, adapter_id, *, save_prefix):
        await world.sessions.change('alice', 'ses-1', lambda found: found.heard(START + timedelta(hours=1)))
        return await park(world.keeper, tenant_id, adapter_id, save_prefix=save_prefix)

    world.keeper.park = come_back
    await world.sessions.add_if_absent(EXPIRED)
    assert await world.settle() == 0
    assert [item[1] for item in world.keeper.asked] == ['ad-1']
    session = await world.session()
    assert (session.state, session.is_settled) == (SessionState.ACTIVE, False)
    del world.keeper.park
    await world.sessions.expire(silent_since=START + timedelta(hours=2))
    assert await world.settle() == 1


async def test_two_gateways_settle_the_same_sessions_together() -> None:
    """Each session is settled, whoever did it; what is told of it is the same."""
    world = World()
    for number in range(250):
        name = f'ses-{number:03}'
        world.keeper.adapters[name] = [f'ad-{number}']
        await world.sessions.add_if_absent(replace(EXPIRED, session_id=name, request_id=name))
    twin = SettleSessions(world.sessions, world.keeper, let_go=world.note)
    await asyncio.gather(world.settle(), twin())
    assert await world.sessions.list_unsettled(after=None, size=1) == []
    assert {item[1] for item in world.keeper.asked} == {f'ad-{number}' for number in range(250)}
    assert (await world.session('ses-007')).checkpoint_paths == ('twinkle://ad-7/weights/session-expired-1',)


async def test_nobody_expires_before_a_gateway_was_there_for_a_lifetime() -> None:
    """Clients could not be heard while it was away; what had ended before is settled at once."""
    world, clock = World(), FakeClock()
    silent = replace(EXPIRED, state=SessionState.ACTIVE, heartbeat_time=clock.now() - 9 * LIFETIME)
    await world.sessions.add_if_absent(silent)
    await world.sessions.add_if_absent(replace(EXPIRED, session_id='ses-2', request_id='rq-2'))
    expire = ExpireSessions(world.sessions, lifetime=LIFETIME, clock=clock, settle=world.settle)
    seen: list[tuple[SessionState, bool]] = []

    async def pause(seconds: float) -> None:
        seen.append(((await world.session()).state, (await world.session('ses-2')).is_settled))
        clock.advance(timedelta(seconds=seconds))
        if len(seen) == 4:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await expire.keep_on(interval=LIFETIME / 2, pause=pause)
    assert seen == [
        (SessionState.ACTIVE, False),
        (SessionState.ACTIVE, True),
        (SessionState.EXPIRED, True),
        (SessionState.EXPIRED, True),
    ]
    assert (await world.session()).is_settled
