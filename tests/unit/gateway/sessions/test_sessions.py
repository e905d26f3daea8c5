"""Operations on sessions."""

from dataclasses import replace
from datetime import timedelta

import pytest

from twinkle_services.gateway.errors import ProjectNotFound, SessionNotFound
from twinkle_services.gateway.keys.sql import SqlProjectStore, SqlTenantStore
from twinkle_services.gateway.keys.tenants import Projects, Tenants
from twinkle_services.gateway.paging import Page
from twinkle_services.gateway.sessions.grpc import GrpcAdapters
from twinkle_services.gateway.sessions.rules import FinishReason, SessionRequest, SessionState
from twinkle_services.gateway.sessions.sessions import Sessions
from twinkle_services.gateway.sessions.sql import SqlSessionStore
from twinkle_services.gateway.sessions.sweep import SessionSettler, SessionSweep
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import RequestIdReused

ALICE, BOB = Caller(tenant_id='alice'), Caller(tenant_id='bob')
LIFETIME = timedelta(minutes=5)
REQUEST = SessionRequest(request_id='rq-1', client='test', user_metadata={'a': 'b'})


async def _skip(session_id: str) -> None:
    """Do nothing."""
    del session_id


class Harness:
    """Sessions and their sweep, and projects, in one database and with one clock."""

    def __init__(self, database: Database) -> None:
        self.clock, self.store = FakeClock(), SqlSessionStore(database)
        tenants = Tenants(SqlTenantStore(database), clock=self.clock)
        self.projects = Projects(SqlProjectStore(database), tenants, clock=self.clock)
        self.sessions = Sessions(self.store, self.projects, lifetime=LIFETIME, clock=self.clock)
        adapters = GrpcAdapters((), internal_token='')
        settler = SessionSettler(self.store, adapters, drop_work=_skip, unpin=_skip)
        self.sweep = SessionSweep(self.store, settler, lifetime=LIFETIME, clock=self.clock)


@pytest.fixture
def harness(database: Database) -> Harness:
    """Operations for the tenants alice and bob."""
    return Harness(database)


async def test_session_belongs_to_the_requested_project_or_to_that_of_its_key(harness: Harness) -> None:
    """A session belongs to the project of its request or of its key; other tenants' projects are unknown."""
    for tenant_id in ('alice', 'bob'):
        await harness.projects.create(tenant_id, f'project-{tenant_id}', display_name='')
    sessions = harness.sessions
    with pytest.raises(ProjectNotFound):
        await sessions.create(ALICE, replace(REQUEST, project_id='project-bob'))
    named = await sessions.create(ALICE, replace(REQUEST, project_id='project-alice'))
    of_key = await sessions.create(replace(ALICE, project_id='project-alice'), replace(REQUEST, request_id='rq-2'))
    unassigned = await sessions.create(ALICE, replace(REQUEST, request_id='rq-3'))
    assert (named.project_id, of_key.project_id, unassigned.project_id) == ('project-alice', 'project-alice', '')
    assert (
        await sessions.assign_project(ALICE, unassigned.session_id, project_id='project-alice')
    ).project_id == 'project-alice'
    assert (await sessions.assign_project(ALICE, unassigned.session_id, project_id='')).project_id == ''
    with pytest.raises(ProjectNotFound):
        await sessions.assign_project(ALICE, unassigned.session_id, project_id='project-bob')
    with pytest.raises(SessionNotFound):
        await sessions.assign_project(BOB, unassigned.session_id, project_id='project-bob')


async def test_repeated_request_returns_the_same_session(harness: Harness) -> None:
    """The same request id returns the same session within a tenant, and is refused with other content."""
    sessions = harness.sessions
    first = await sessions.create(ALICE, REQUEST)
    assert await sessions.create(ALICE, REQUEST) == first
    assert (await sessions.create(BOB, REQUEST)).session_id != first.session_id
    with pytest.raises(RequestIdReused):
        await sessions.create(ALICE, SessionRequest(request_id='rq-1', client='other', user_metadata={}))


async def test_heartbeat_revives_an_expired_session(harness: Harness) -> None:
    """A silent session is reported as expired before and after the sweep, until its next heartbeat."""
    session = await harness.sessions.create(ALICE, REQUEST)
    harness.clock.advance(LIFETIME + timedelta(seconds=1))
    assert (await harness.sessions.get(ALICE, session.session_id)).state is SessionState.EXPIRED
    assert await harness.sweep.expire() == 1
    listing = await harness.sessions.list(ALICE, Page(size=5))
    assert [item.state for item in listing.items] == [SessionState.EXPIRED]
    assert (await harness.sessions.heartbeat(ALICE, session.session_id)).state is SessionState.ACTIVE
    assert (await harness.sessions.get(ALICE, session.session_id)).state is SessionState.ACTIVE


async def test_session_of_another_tenant_is_not_found(harness: Harness) -> None:
    """The id of another tenant's session raises the same error as an unknown id."""
    sessions = harness.sessions
    session = await sessions.create(ALICE, REQUEST)
    for session_id in (session.session_id, 'ses-unknown'):
        with pytest.raises(SessionNotFound):
            await sessions.get(BOB, session_id)
        with pytest.raises(SessionNotFound):
            await sessions.heartbeat(BOB, session_id)
        with pytest.raises(SessionNotFound):
            await sessions.finish(BOB, session_id, reason=FinishReason.SUCCESS)
