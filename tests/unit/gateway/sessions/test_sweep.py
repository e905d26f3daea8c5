"""Sweeps over sessions: expired and finished sessions are settled once, and failed steps are repeated."""

import asyncio
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest

from twinkle_services.gateway.keys.rules import Tenant
from twinkle_services.gateway.keys.sql import SqlTenantStore
from twinkle_services.gateway.sessions.rules import FinishReason, ParkedAdapter, Session, SessionState
from twinkle_services.gateway.sessions.sql import SqlSessionStore
from twinkle_services.gateway.sessions.sweep import SessionSettler, SessionSweep
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import DomainError, ServiceUnreachable
from twinkle_services.kit.rpc.context import current_caller

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
class FakeAdapters:
    """Fake adapters of all model services."""

    adapters: dict[str, list[str]] = field(default_factory=lambda: {'ses-1': ['ad-1', 'ad-2']})
    parked: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """Tenant, adapter and prefix of each call of `park`."""
    failures: dict[str, DomainError] = field(default_factory=dict[str, DomainError])
    """Error that `park` raises, by adapter."""
    busy: set[str] = field(default_factory=set[str])
    deleted: set[str] = field(default_factory=set[str])

    async def of_session(self, tenant_id: str, session_id: str) -> list[str]:
        del tenant_id
        return self.adapters.get(session_id, [])

    async def park(self, tenant_id: str, adapter_id: str, *, save_prefix: str) -> ParkedAdapter | None:
        self.parked.append((tenant_id, adapter_id, save_prefix))
        if adapter_id in self.failures:
            raise self.failures[adapter_id]
        if adapter_id in self.deleted:
            return None
        path = f'twinkle://{adapter_id}/weights/{save_prefix}-1' if save_prefix else ''
        return ParkedAdapter(is_idle=adapter_id not in self.busy, checkpoint_path=path)


class Harness:
    """A settler over a session store and fake services."""

    def __init__(self, database: Database) -> None:
        self.tenants = {'alice'}
        """Tenants of the sessions."""
        self.sessions, self.adapters = SqlSessionStore(database), FakeAdapters()
        self.unpinned: list[str] = []
        """Sessions whose versions were unpinned."""
        self.dropped: list[str] = []
        """Sessions whose work was dropped."""
        self.failure: DomainError | None = None
        self.settler = SessionSettler(self.sessions, self.adapters, drop_work=self.drop_work, unpin=self.unpin)

    async def unpin(self, session_id: str) -> None:
        """Record the session, or raise `failure`; the caller must belong to a tenant of the sessions."""
        assert current_caller().tenant_id in self.tenants
        if self.failure is not None:
            raise self.failure
        self.unpinned.append(session_id)

    async def drop_work(self, session_id: str) -> None:
        """Record the session; the caller must belong to a tenant of the sessions."""
        assert current_caller().tenant_id in self.tenants
        self.dropped.append(session_id)

    async def session(self, session_id: str = 'ses-1') -> Session:
        """Return a stored session of alice."""
        found = await self.sessions.get('alice', session_id)
        assert found is not None
        return found


@pytest.fixture
def harness(database: Database) -> Harness:
    """A settler without sessions."""
    return Harness(database)


async def settle_all(settler: SessionSettler) -> int:
    """Settle all ended sessions; return the number of sessions settled now."""
    return sum(await asyncio.gather(*await settler.start()))


async def test_expired_session_is_saved_parked_and_unpinned(harness: Harness) -> None:
    """All adapters of an expired session are saved and parked once, and the session records the checkpoints."""
    await harness.sessions.add_if_absent(EXPIRED)
    assert await settle_all(harness.settler) == 1
    assert harness.adapters.parked == [('alice', name, 'session-expired') for name in ('ad-1', 'ad-2')]
    assert (harness.dropped, harness.unpinned) == (['ses-1'], ['ses-1'])
    paths = tuple(f'twinkle://{name}/weights/session-expired-1' for name in ('ad-1', 'ad-2'))
    assert (await harness.session()).checkpoint_paths == paths
    assert await settle_all(harness.settler) == 0
    assert len(harness.adapters.parked) == 2


@pytest.mark.parametrize(
    ('reason', 'prefix'),
    [(FinishReason.SUCCESS, ''), (FinishReason.FAILED, 'session-ended'), (FinishReason.INTERRUPTED, 'session-ended')],
)
async def test_finished_session_is_saved_unless_the_client_reports_success(harness: Harness, reason, prefix) -> None:
    """The adapters of a finished session are parked, and saved only if its client did not report success."""
    await harness.sessions.add_if_absent(replace(EXPIRED, state=SessionState.ACTIVE).finished(reason))
    assert await settle_all(harness.settler) == 1
    assert {item[2] for item in harness.adapters.parked} == {prefix}
    assert harness.unpinned == ['ses-1']


async def test_active_session_is_not_settled(harness: Harness) -> None:
    """The adapters of an active session are not parked."""
    await harness.sessions.add_if_absent(replace(EXPIRED, state=SessionState.ACTIVE))
    assert await settle_all(harness.settler) == 0
    assert harness.adapters.parked == []


@pytest.mark.parametrize('fault', ['failures', 'busy', 'failure'])
async def test_failed_work_is_repeated_by_the_next_sweep(harness: Harness, fault) -> None:
    """A failure affects neither other adapters nor other sessions, and the next sweep repeats the failed step."""
    harness.adapters.adapters['ses-2'] = ['ad-3']
    await harness.sessions.add_if_absent(EXPIRED)
    later = START + timedelta(seconds=1)
    other = replace(EXPIRED, session_id='ses-2', request_id='rq-2', heartbeat_time=later)
    await harness.sessions.add_if_absent(other)
    if fault == 'failures':
        harness.adapters.failures['ad-1'] = ServiceUnreachable('model')
    if fault == 'busy':
        harness.adapters.busy.add('ad-1')
    if fault == 'failure':
        harness.failure = ServiceUnreachable('checkpoint')
    assert await settle_all(harness.settler) == (0 if fault == 'failure' else 1)
    assert {item[1] for item in harness.adapters.parked} == {'ad-1', 'ad-2', 'ad-3'}
    assert not (await harness.session()).is_settled
    harness.adapters.failures.clear()
    harness.adapters.busy.clear()
    harness.failure = None
    assert await settle_all(harness.settler) == (2 if fault == 'failure' else 1)
    assert (await harness.session()).is_settled


async def test_versions_are_unpinned_although_an_adapter_cannot_be_parked(harness: Harness) -> None:
    """A session's versions are unpinned even if parking one of its adapters always fails."""
    harness.adapters.failures['ad-1'] = ServiceUnreachable('model')
    await harness.sessions.add_if_absent(EXPIRED)
    assert await settle_all(harness.settler) == 0
    assert harness.unpinned == ['ses-1']


async def test_deleted_adapter_is_skipped(harness: Harness) -> None:
    """A session is settled although one of its adapters was deleted."""
    harness.adapters.deleted.add('ad-1')
    await harness.sessions.add_if_absent(EXPIRED)
    assert await settle_all(harness.settler) == 1
    assert (await harness.session()).checkpoint_paths == ('twinkle://ad-2/weights/session-expired-1',)


async def test_session_revived_during_its_settlement_stays_active(harness: Harness) -> None:
    """A heartbeat during the settlement stops the settlement, and the session is settled after its next expiry."""
    park = FakeAdapters.park

    async def park_after_heartbeat(tenant_id, adapter_id, *, save_prefix):
        await harness.sessions.change('alice', 'ses-1', lambda found: found.with_heartbeat(START + timedelta(hours=1)))
        return await park(harness.adapters, tenant_id, adapter_id, save_prefix=save_prefix)

    harness.adapters.park = park_after_heartbeat
    await harness.sessions.add_if_absent(EXPIRED)
    assert await settle_all(harness.settler) == 0
    assert [item[1] for item in harness.adapters.parked] == ['ad-1']
    session = await harness.session()
    assert (session.state, session.is_settled) == (SessionState.ACTIVE, False)
    del harness.adapters.park
    await harness.sessions.expire(silent_since=START + timedelta(hours=2))
    assert await settle_all(harness.settler) == 1


async def test_two_gateways_can_settle_the_same_sessions(harness: Harness) -> None:
    """All sessions are settled, with the same checkpoint paths, when two gateways sweep at the same time."""
    for number in range(20):
        name = f'ses-{number:02}'
        harness.adapters.adapters[name] = [f'ad-{number}']
        await harness.sessions.add_if_absent(replace(EXPIRED, session_id=name, request_id=name))
    other_settler = SessionSettler(harness.sessions, harness.adapters, drop_work=harness.drop_work, unpin=harness.unpin)
    await asyncio.gather(settle_all(harness.settler), settle_all(other_settler))
    assert await harness.sessions.list_unsettled(after=None, size=1) == []
    assert {item[1] for item in harness.adapters.parked} == {f'ad-{number}' for number in range(20)}
    assert (await harness.session('ses-07')).checkpoint_paths == ('twinkle://ad-7/weights/session-expired-1',)


async def test_slow_sessions_of_a_tenant_delay_no_other_tenant(harness: Harness, database: Database) -> None:
    """Sweeps settle other tenants' sessions while those of one tenant take long, and settle each slow session once."""
    released, park = asyncio.Event(), FakeAdapters.park

    async def park_slowly(tenant_id, adapter_id, *, save_prefix):
        if tenant_id == 'mallory':
            await released.wait()
        return await park(harness.adapters, tenant_id, adapter_id, save_prefix=save_prefix)

    harness.adapters.park, harness.tenants = park_slowly, {'alice', 'mallory'}
    # The settler lists ended sessions in two pages.
    count = 101
    mallory = Tenant(tenant_id='mallory', display_name='', create_time=START)
    await SqlTenantStore(database).add_if_absent(mallory)
    for number in range(count):
        name = f'slow-{number:03}'
        harness.adapters.adapters[name] = [f'ad-{name}']
        slow = replace(EXPIRED, tenant_id='mallory', session_id=name, request_id=name)
        await harness.sessions.add_if_absent(slow)
    slow_workers = await harness.settler.start()
    for name in ('ses-1', 'ses-2'):
        await harness.sessions.add_if_absent(replace(EXPIRED, session_id=name, request_id=name))
        assert await settle_all(harness.settler) == 1
    assert {tenant_id for tenant_id, _, _ in harness.adapters.parked} == {'alice'}
    released.set()
    assert await asyncio.gather(*slow_workers) == [count]
    assert len(set(harness.adapters.parked)) == len(harness.adapters.parked)


async def test_no_session_expires_within_a_lifetime_of_the_start(harness: Harness) -> None:
    """No session expires within one lifetime of the gateway's start, but the first sweep settles expired sessions."""
    clock = FakeClock()
    silent = replace(EXPIRED, state=SessionState.ACTIVE, heartbeat_time=clock.now() - 9 * LIFETIME)
    await harness.sessions.add_if_absent(silent)
    await harness.sessions.add_if_absent(replace(EXPIRED, session_id='ses-2', request_id='rq-2'))
    sweep = SessionSweep(harness.sessions, harness.settler, lifetime=LIFETIME, clock=clock)
    observed: list[tuple[SessionState, bool]] = []

    async def pause(seconds: float) -> None:
        observed.append(((await harness.session()).state, (await harness.session('ses-2')).is_settled))
        clock.advance(timedelta(seconds=seconds))
        if len(observed) == 4:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await sweep.run(interval=LIFETIME / 2, pause=pause)
    assert observed == [
        (SessionState.ACTIVE, False),
        (SessionState.ACTIVE, True),
        (SessionState.EXPIRED, True),
        (SessionState.EXPIRED, True),
    ]
    assert (await harness.session()).is_settled
