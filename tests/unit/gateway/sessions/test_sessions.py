"""Operations on sessions, over the stores in memory."""

from dataclasses import replace
from datetime import timedelta

import pytest

from fixtures.gateway_stores import MemoryProjectStore, MemoryRunStore, MemorySessionStore, MemoryTenantStore
from services.gateway.catalogue.get_run import GetRun
from services.gateway.errors import ProjectNotFound, RunNotFound, SessionNotFound
from services.gateway.keys.tenants import Projects, Tenants
from services.gateway.paging import Page
from services.gateway.sessions.assign_project import AssignProject
from services.gateway.sessions.create_session import CreateSession, SessionOrder
from services.gateway.sessions.expire_sessions import ExpireSessions
from services.gateway.sessions.finish_session import FinishSession
from services.gateway.sessions.get_session import GetSession
from services.gateway.sessions.heartbeat import Heartbeat
from services.gateway.sessions.list_sessions import ListSessions
from services.gateway.sessions.session import FinishReason, SessionState
from services.kit.caller import Caller
from services.kit.clock import FakeClock
from services.kit.errors import RequestIdReused

ALICE, BOB = Caller(tenant_id='alice'), Caller(tenant_id='bob')
LIFETIME = timedelta(minutes=5)
ORDER = SessionOrder(request_id='rq-1', client='test', user_metadata={'a': 'b'})


async def test_sessions_belong_to_the_project_named_or_else_to_that_of_their_key() -> None:
    """A project must exist in the caller's own tenant; another tenant's is as absent."""
    clock, sessions, project_store = FakeClock(), MemorySessionStore(), MemoryProjectStore()
    tenants = Tenants(MemoryTenantStore(), clock=clock)
    projects = Projects(project_store, tenants, clock=clock)
    for tenant_id in ('alice', 'bob'):
        await tenants.create(tenant_id, display_name='')
        await projects.create(tenant_id, f'of-{tenant_id}', display_name='')
    create = CreateSession(sessions, project_store, clock=clock)
    with pytest.raises(ProjectNotFound):
        await create(ALICE, replace(ORDER, project_id='of-bob'))
    named = await create(ALICE, replace(ORDER, project_id='of-alice'))
    of_key = await create(replace(ALICE, project_id='of-alice'), replace(ORDER, request_id='rq-2'))
    bare = await create(ALICE, replace(ORDER, request_id='rq-3'))
    assert (named.project_id, of_key.project_id, bare.project_id) == ('of-alice', 'of-alice', '')
    assign = AssignProject(sessions, project_store)
    assert (await assign(ALICE, bare.session_id, project_id='of-alice')).project_id == 'of-alice'
    assert (await assign(ALICE, bare.session_id, project_id='')).project_id == ''
    with pytest.raises(ProjectNotFound):
        await assign(ALICE, bare.session_id, project_id='of-bob')
    with pytest.raises(SessionNotFound):
        await assign(BOB, bare.session_id, project_id='of-bob')


async def test_session_repeats_are_harmless() -> None:
    """The same request returns the same session; other content under its id is refused."""
    create = CreateSession(MemorySessionStore(), MemoryProjectStore(), clock=FakeClock())
    first = await create(ALICE, ORDER)
    assert await create(ALICE, ORDER) == first
    assert (await create(BOB, ORDER)).session_id != first.session_id
    with pytest.raises(RequestIdReused):
        await create(ALICE, SessionOrder(request_id='rq-1', client='other', user_metadata={}))


async def test_expired_session_comes_back_with_a_heartbeat() -> None:
    """Silence shows at once, the sweep writes it down, and a heartbeat undoes it."""
    store, clock = MemorySessionStore(), FakeClock()
    session = await CreateSession(store, MemoryProjectStore(), clock=clock)(ALICE, ORDER)
    get = GetSession(store, lifetime=LIFETIME, clock=clock)
    clock.advance(LIFETIME + timedelta(seconds=1))
    assert (await get(ALICE, session.session_id)).state is SessionState.EXPIRED
    assert await ExpireSessions(store, lifetime=LIFETIME, clock=clock)() == 1
    listing = await ListSessions(store, lifetime=LIFETIME, clock=clock)(ALICE, Page(size=5))
    assert [item.state for item in listing.items] == [SessionState.EXPIRED]
    assert (await Heartbeat(store, clock=clock)(ALICE, session.session_id)).state is SessionState.ACTIVE
    assert (await get(ALICE, session.session_id)).state is SessionState.ACTIVE


async def test_foreign_sessions_and_runs_are_as_absent() -> None:
    """Another tenant's id raises exactly what an unknown id raises."""
    store, clock = MemorySessionStore(), FakeClock()
    session = await CreateSession(store, MemoryProjectStore(), clock=clock)(ALICE, ORDER)
    for session_id in (session.session_id, 'ses-unknown'):
        with pytest.raises(SessionNotFound):
            await GetSession(store, lifetime=LIFETIME, clock=clock)(BOB, session_id)
        with pytest.raises(SessionNotFound):
            await Heartbeat(store, clock=clock)(BOB, session_id)
        with pytest.raises(SessionNotFound):
            await FinishSession(store)(BOB, session_id, reason=FinishReason.SUCCESS)
    with pytest.raises(RunNotFound):
        await GetRun(MemoryRunStore())(BOB, 'ad-1')
