"""The gateway's verbs over the stores in memory."""

from dataclasses import replace
from datetime import timedelta

import pytest

from fixtures.gateway_stores import (
    MemoryKeyStore,
    MemoryProjectStore,
    MemoryRunStore,
    MemorySessionStore,
    MemoryTenantStore,
)
from services.gateway.catalogue.get_run import GetRun
from services.gateway.errors import (
    KeyEnded,
    KeyNotFound,
    ProjectNotFound,
    RunNotFound,
    SessionNotFound,
    TenantNotFound,
)
from services.gateway.keys.api_key import Scope, every_scope
from services.gateway.keys.assign_project import AssignProject
from services.gateway.keys.create_key import CreateKey, KeyOrder
from services.gateway.keys.create_project import CreateProject
from services.gateway.keys.create_tenant import CreateTenant
from services.gateway.keys.hasher import PepperedHasher
from services.gateway.keys.install_bootstrap_key import InstallBootstrapKey
from services.gateway.keys.list_keys import ListKeys
from services.gateway.keys.revoke_key import RevokeKey
from services.gateway.keys.rotate_key import RotateKey
from services.gateway.keys.verify_key import MAX_REMEMBERED, VerifyKey
from services.gateway.paging import Page
from services.gateway.sessions.create_session import CreateSession, SessionOrder
from services.gateway.sessions.expire_sessions import ExpireSessions
from services.gateway.sessions.finish_session import FinishSession
from services.gateway.sessions.get_session import GetSession
from services.gateway.sessions.heartbeat import Heartbeat
from services.gateway.sessions.list_sessions import ListSessions
from services.gateway.sessions.session import FinishReason, SessionState
from services.kit.caller import Caller
from services.kit.clock import FakeClock
from services.kit.errors import CredentialsInvalid, RequestIdReused

ALICE, BOB = Caller(tenant_id='alice'), Caller(tenant_id='bob')
LIFETIME = timedelta(minutes=5)
ORDER = SessionOrder(request_id='rq-1', client='test', user_metadata={'a': 'b'})


class Keys:
    """The verbs about keys, on one clock."""

    def __init__(self) -> None:
        """Begin with the bare tenant alice."""
        self.clock = FakeClock()
        self.tenants = MemoryTenantStore()
        self.store = MemoryKeyStore()
        hasher = PepperedHasher(b'p' * 32)
        self.verify = VerifyKey(self.store, hasher=hasher, clock=self.clock, memory=timedelta(seconds=5))
        self.create_tenant = CreateTenant(self.tenants, clock=self.clock)
        self.projects = MemoryProjectStore()
        self.create_project = CreateProject(self.tenants, self.projects, clock=self.clock)
        self.create = CreateKey(self.tenants, self.projects, self.store, hasher=hasher, clock=self.clock)
        self.rotate = RotateKey(self.store, hasher=hasher, verify=self.verify, clock=self.clock)
        self.revoke = RevokeKey(self.store, verify=self.verify, clock=self.clock)
        self.list = ListKeys(self.tenants, self.store)
        self.bootstrap = InstallBootstrapKey(self.tenants, self.store, hasher=hasher, clock=self.clock)

    async def make(self, ttl: timedelta | None = None):
        """Make a key of alice."""
        await self.create_tenant('alice', display_name='Alice')
        order = KeyOrder(tenant_id='alice', scopes=frozenset({Scope.TRAIN}), display_name='', ttl=ttl)
        return await self.create(order)


async def test_new_key_is_verified_and_never_shows_its_secret_again() -> None:
    """The secret leads to the key; neither the listing nor a printed order holds it."""
    keys = Keys()
    made = await keys.make()
    assert await keys.verify(made.secret) == made.key
    listed = await keys.list('alice', Page(size=5))
    assert listed.items == [made.key]
    assert made.secret not in repr(made)


async def test_unknown_expired_and_revoked_keys_are_refused_alike() -> None:
    """All three raise the same error with the same facts."""
    keys = Keys()
    expired, revoked = await keys.make(ttl=timedelta(minutes=1)), await keys.make()
    await keys.revoke(revoked.key.key_id)
    keys.clock.advance(timedelta(minutes=1))
    seen = []
    for secret in (expired.secret, revoked.secret, 'tml-unknown'):
        with pytest.raises(CredentialsInvalid) as caught:
            await keys.verify(secret)
        seen.append((str(caught.value), caught.value.metadata()))
    assert seen[0] == seen[1] == seen[2]


async def test_key_expires_while_it_is_remembered() -> None:
    """The memory of a key does not outlive the key."""
    keys = Keys()
    made = await keys.make(ttl=timedelta(seconds=3))
    await keys.verify(made.secret)
    keys.clock.advance(timedelta(seconds=3))
    with pytest.raises(CredentialsInvalid):
        await keys.verify(made.secret)


async def test_key_is_looked_up_once_while_it_is_remembered() -> None:
    """Within the memory's time the store is asked once, also for a key that does not exist."""
    keys = Keys()
    made = await keys.make()
    for _ in range(10):
        await keys.verify(made.secret)
    assert keys.store.find_count == 1
    keys.clock.advance(timedelta(seconds=5))
    await keys.verify(made.secret)
    assert keys.store.find_count == 2


async def test_revoking_takes_effect_at_once() -> None:
    """A remembered key is worthless right after it was revoked here."""
    keys = Keys()
    made = await keys.make()
    await keys.verify(made.secret)
    await keys.revoke(made.key.key_id)
    with pytest.raises(CredentialsInvalid):
        await keys.verify(made.secret)


async def test_guesses_never_evict_a_good_key() -> None:
    """However many unknown secrets come, a good key stays remembered and memory stays bounded."""
    keys = Keys()
    made = await keys.make()
    await keys.verify(made.secret)
    for number in range(MAX_REMEMBERED + 10):
        with pytest.raises(CredentialsInvalid):
            await keys.verify(f'tml-guess-{number}')
    before = keys.store.find_count
    await keys.verify(made.secret)
    assert keys.store.find_count == before
    with pytest.raises(CredentialsInvalid):
        await keys.verify('tml-guess-0')
    assert keys.store.find_count == before + 1


async def test_keys_need_a_tenant_that_exists() -> None:
    """Neither making nor listing keys works for nobody; revoking needs a key."""
    keys = Keys()
    order = KeyOrder(tenant_id='nobody', scopes=every_scope(), display_name='', ttl=None)
    with pytest.raises(TenantNotFound):
        await keys.create(order)
    with pytest.raises(TenantNotFound):
        await keys.list('nobody', Page(size=5))
    with pytest.raises(KeyNotFound):
        await keys.revoke('key-9')


async def test_rotated_key_works_beside_the_new_one_for_a_while() -> None:
    """The heir has the rights and the lifetime of the old key, which ends after the overlap."""
    keys = Keys()
    old = await keys.make(ttl=timedelta(days=30))
    keys.clock.advance(timedelta(days=10))
    rotated = await keys.rotate(old.key.key_id, overlap=timedelta(hours=1))
    heir = await keys.verify(rotated.new.secret)
    assert (heir.tenant_id, heir.scopes, heir.replaces_key_id) == ('alice', old.key.scopes, old.key.key_id)
    assert heir.lifetime == timedelta(days=30)
    assert (await keys.verify(old.secret)).key_id == old.key.key_id
    keys.clock.advance(timedelta(hours=1))
    with pytest.raises(CredentialsInvalid):
        await keys.verify(old.secret)
    assert await keys.verify(rotated.new.secret) == heir


async def test_key_rotated_without_overlap_ends_at_once_though_it_is_remembered() -> None:
    """What was looked up a moment ago is asked anew, and what has ended cannot be replaced."""
    keys = Keys()
    old = await keys.make()
    await keys.verify(old.secret)
    await keys.rotate(old.key.key_id, overlap=timedelta())
    with pytest.raises(CredentialsInvalid):
        await keys.verify(old.secret)
    with pytest.raises(KeyEnded):
        await keys.rotate(old.key.key_id, overlap=timedelta(days=1))
    with pytest.raises(KeyNotFound):
        await keys.rotate('key-9', overlap=timedelta(days=1))


async def test_second_rotation_neither_delays_the_end_nor_shortens_the_heir() -> None:
    """Where the first answer was lost, another heir is as good, and the old key still ends when it was told to."""
    keys = Keys()
    old = await keys.make(ttl=timedelta(days=30))
    await keys.rotate(old.key.key_id, overlap=timedelta(hours=1))
    again = await keys.rotate(old.key.key_id, overlap=timedelta(days=7))
    assert again.old.retire_time == keys.clock.now() + timedelta(hours=1)
    assert again.new.key.lifetime == timedelta(days=30)


async def test_sessions_belong_to_the_project_named_or_else_to_that_of_their_key() -> None:
    """A project must exist in the caller's own tenant; another tenant's is as absent."""
    keys, sessions = Keys(), MemorySessionStore()
    for tenant_id in ('alice', 'bob'):
        await keys.create_tenant(tenant_id, display_name='')
        await keys.create_project(tenant_id, f'of-{tenant_id}', display_name='')
    create = CreateSession(sessions, keys.projects, clock=keys.clock)
    with pytest.raises(ProjectNotFound):
        await create(ALICE, replace(ORDER, project_id='of-bob'))
    named = await create(ALICE, replace(ORDER, project_id='of-alice'))
    of_key = await create(replace(ALICE, project_id='of-alice'), replace(ORDER, request_id='rq-2'))
    bare = await create(ALICE, replace(ORDER, request_id='rq-3'))
    assert (named.project_id, of_key.project_id, bare.project_id) == ('of-alice', 'of-alice', '')
    assign = AssignProject(sessions, keys.projects)
    assert (await assign(ALICE, bare.session_id, project_id='of-alice')).project_id == 'of-alice'
    assert (await assign(ALICE, bare.session_id, project_id='')).project_id == ''
    with pytest.raises(ProjectNotFound):
        await assign(ALICE, bare.session_id, project_id='of-bob')
    with pytest.raises(SessionNotFound):
        await assign(BOB, bare.session_id, project_id='of-bob')


async def test_key_needs_a_project_that_its_tenant_has() -> None:
    """A key for another tenant's project, or none, is refused."""
    keys = Keys()
    await keys.create_tenant('alice', display_name='')
    await keys.create_tenant('bob', display_name='')
    await keys.create_project('bob', 'of-bob', display_name='')
    order = KeyOrder(tenant_id='alice', scopes=every_scope(), display_name='', ttl=None, project_id='of-bob')
    with pytest.raises(ProjectNotFound):
        await keys.create(order)
    with pytest.raises(TenantNotFound):
        await keys.create_project('nobody', 'p', display_name='')
    made = await keys.create(replace(order, tenant_id='bob'))
    assert (await keys.verify(made.secret)).project_id == 'of-bob'


async def test_bootstrap_key_works_and_is_kept_once() -> None:
    """The given secret is a key of the default tenant with every scope, also when installed twice."""
    keys = Keys()
    for _ in range(2):
        await keys.bootstrap('tml-bootstrap-secret-for-tests')
    key = await keys.verify('tml-bootstrap-secret-for-tests')
    assert (key.tenant_id, key.scopes) == ('default', every_scope())
    assert len((await keys.list('default', Page(size=5))).items) == 1


async def test_no_bootstrap_key_makes_no_key() -> None:
    """Without a secret only the tenant is made."""
    keys = Keys()
    await keys.bootstrap('')
    assert (await keys.list('default', Page(size=5))).items == []


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
