"""Operations on tenants, projects and keys."""

from dataclasses import replace
from datetime import timedelta

import pytest

from twinkle_services.gateway.credentials import Scope
from twinkle_services.gateway.errors import KeyEnded, KeyNotFound, ProjectNotFound, TenantNotFound
from twinkle_services.gateway.keys.authenticator import MAX_CACHED, KeyVerifier
from twinkle_services.gateway.keys.keys import Keys
from twinkle_services.gateway.keys.pepper import PepperedHasher
from twinkle_services.gateway.keys.rules import ApiKey, IssuedKey, KeyRequest
from twinkle_services.gateway.keys.sql import SqlKeyStore, SqlProjectStore, SqlTenantStore
from twinkle_services.gateway.keys.tenants import Projects, Tenants
from twinkle_services.gateway.paging import Page
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import CredentialsInvalid

REQUEST = KeyRequest(tenant_id='alice', scopes=frozenset({Scope.TRAIN}), display_name='', ttl=None)


class CountingStore(SqlKeyStore):
    """Counts lookups of keys. Lookups of `guesses`, which are digests of no key, do not read the database."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.find_count = 0
        self.guesses: frozenset[bytes] = frozenset()

    async def find(self, digest: bytes) -> ApiKey | None:
        self.find_count += 1
        return None if digest in self.guesses else await super().find(digest)


class Harness:
    """Tenants, projects and keys in one database, with one clock."""

    def __init__(self, database: Database) -> None:
        self.clock = FakeClock()
        self.store = CountingStore(database)
        hasher = PepperedHasher(b'p' * 32)
        self.verifier = KeyVerifier(self.store, hasher=hasher, clock=self.clock, memory=timedelta(seconds=5))
        self.tenants = Tenants(SqlTenantStore(database), clock=self.clock)
        self.projects = Projects(SqlProjectStore(database), self.tenants, clock=self.clock)
        self.keys = Keys(self.store, self.tenants, self.projects, verifier=self.verifier, clock=self.clock)

    async def issue(self, ttl: timedelta | None = None) -> IssuedKey:
        """Create the tenant alice, and return a new key of hers."""
        await self.tenants.create('alice', display_name='Alice')
        return await self.keys.create(replace(REQUEST, ttl=ttl))


@pytest.fixture
def harness(database: Database) -> Harness:
    """Operations on a database without keys."""
    return Harness(database)


async def test_new_key_is_valid_and_its_secret_is_not_shown_again(harness: Harness) -> None:
    """A new secret is valid for its key; neither the list of keys nor `repr` contains the secret."""
    issued = await harness.issue()
    assert await harness.verifier.verify(issued.secret) == issued.key
    listed = await harness.keys.list('alice', Page(size=5))
    assert listed.items == [issued.key]
    assert issued.secret not in repr(issued)


async def test_unknown_expired_and_revoked_keys_raise_the_same_error(harness: Harness) -> None:
    """An unknown, an expired and a revoked secret raise errors with equal text and metadata."""
    expired, revoked = await harness.issue(ttl=timedelta(minutes=1)), await harness.issue()
    await harness.keys.revoke(revoked.key.key_id)
    harness.clock.advance(timedelta(minutes=1))
    errors = []
    for secret in (expired.secret, revoked.secret, 'tml-unknown'):
        with pytest.raises(CredentialsInvalid) as caught:
            await harness.verifier.verify(secret)
        errors.append((str(caught.value), caught.value.metadata()))
    assert errors[0] == errors[1] == errors[2]


async def test_cached_key_expires_on_time(harness: Harness) -> None:
    """A key that is still cached is refused once it has expired."""
    issued = await harness.issue(ttl=timedelta(seconds=3))
    await harness.verifier.verify(issued.secret)
    harness.clock.advance(timedelta(seconds=3))
    with pytest.raises(CredentialsInvalid):
        await harness.verifier.verify(issued.secret)


async def test_key_is_looked_up_once_while_it_is_cached(harness: Harness) -> None:
    """The store is read once during the lifetime of a cached key, and again afterwards."""
    issued = await harness.issue()
    for _ in range(10):
        await harness.verifier.verify(issued.secret)
    assert harness.store.find_count == 1
    harness.clock.advance(timedelta(seconds=5))
    await harness.verifier.verify(issued.secret)
    assert harness.store.find_count == 2


async def test_revocation_takes_effect_immediately(harness: Harness) -> None:
    """A cached key is refused immediately after this gateway has revoked it."""
    issued = await harness.issue()
    await harness.verifier.verify(issued.secret)
    await harness.keys.revoke(issued.key.key_id)
    with pytest.raises(CredentialsInvalid):
        await harness.verifier.verify(issued.secret)


async def test_unknown_secrets_do_not_evict_a_valid_key(harness: Harness) -> None:
    """A valid key stays cached after many unknown secrets, which are cached separately and in limited number."""
    issued = await harness.issue()
    await harness.verifier.verify(issued.secret)
    guesses = [f'tml-guess-{number}' for number in range(MAX_CACHED + 10)]
    harness.store.guesses = frozenset(map(harness.verifier.digest, guesses))
    for guess in guesses:
        with pytest.raises(CredentialsInvalid):
            await harness.verifier.verify(guess)
    before = harness.store.find_count
    await harness.verifier.verify(issued.secret)
    assert harness.store.find_count == before
    with pytest.raises(CredentialsInvalid):
        await harness.verifier.verify(guesses[0])
    assert harness.store.find_count == before + 1


async def test_unknown_tenants_and_keys_are_not_found(harness: Harness) -> None:
    """Creating and listing keys need an existing tenant, and revoking needs an existing key."""
    with pytest.raises(TenantNotFound):
        await harness.keys.create(replace(REQUEST, tenant_id='unknown'))
    with pytest.raises(TenantNotFound):
        await harness.keys.list('unknown', Page(size=5))
    with pytest.raises(KeyNotFound):
        await harness.keys.revoke('key-9')


async def test_rotated_key_stays_valid_during_the_overlap(harness: Harness) -> None:
    """The new key has the rights and the lifetime of the old key; the old key is valid until the overlap ends."""
    old = await harness.issue(ttl=timedelta(days=30))
    harness.clock.advance(timedelta(days=10))
    rotated = await harness.keys.rotate(old.key.key_id, overlap=timedelta(hours=1))
    new = await harness.verifier.verify(rotated.secret)
    assert (new.tenant_id, new.scopes, new.replaces_key_id) == ('alice', old.key.scopes, old.key.key_id)
    assert new.lifetime == timedelta(days=30)
    assert (await harness.verifier.verify(old.secret)).key_id == old.key.key_id
    harness.clock.advance(timedelta(hours=1))
    with pytest.raises(CredentialsInvalid):
        await harness.verifier.verify(old.secret)
    assert await harness.verifier.verify(rotated.secret) == new


async def test_key_rotated_without_overlap_expires_immediately(harness: Harness) -> None:
    """A cached key is refused immediately after a rotation without overlap, and cannot be rotated again."""
    old = await harness.issue()
    await harness.verifier.verify(old.secret)
    await harness.keys.rotate(old.key.key_id, overlap=timedelta())
    with pytest.raises(CredentialsInvalid):
        await harness.verifier.verify(old.secret)
    with pytest.raises(KeyEnded):
        await harness.keys.rotate(old.key.key_id, overlap=timedelta(days=1))
    with pytest.raises(KeyNotFound):
        await harness.keys.rotate('key-9', overlap=timedelta(days=1))


async def test_second_rotation_keeps_the_first_retire_time(harness: Harness) -> None:
    """A second rotation does not extend the old key or shorten the lifetime of the new key."""
    old = await harness.issue(ttl=timedelta(days=30))
    await harness.keys.rotate(old.key.key_id, overlap=timedelta(hours=1))
    again = await harness.keys.rotate(old.key.key_id, overlap=timedelta(days=7))
    assert again.replaced is not None
    assert again.replaced.retire_time == harness.clock.now() + timedelta(hours=1)
    assert again.key.lifetime == timedelta(days=30)


async def test_key_needs_a_project_of_its_own_tenant(harness: Harness) -> None:
    """A key cannot have another tenant's project, and a project needs an existing tenant."""
    await harness.tenants.create('alice', display_name='')
    await harness.tenants.create('bob', display_name='')
    await harness.projects.create('bob', 'project-bob', display_name='')
    with pytest.raises(ProjectNotFound):
        await harness.keys.create(replace(REQUEST, project_id='project-bob'))
    with pytest.raises(TenantNotFound):
        await harness.projects.create('unknown', 'p', display_name='')
    issued = await harness.keys.create(replace(REQUEST, project_id='project-bob', tenant_id='bob'))
    assert (await harness.verifier.verify(issued.secret)).project_id == 'project-bob'


async def test_bootstrap_key_is_installed_once(harness: Harness) -> None:
    """Installing a secret twice creates one key of the default tenant, with all scopes."""
    for _ in range(2):
        await harness.keys.install_bootstrap_key('tml-bootstrap-secret-for-tests')
    key = await harness.verifier.verify('tml-bootstrap-secret-for-tests')
    assert (key.tenant_id, key.scopes) == ('default', frozenset(Scope))
    assert len((await harness.keys.list('default', Page(size=5))).items) == 1


async def test_empty_bootstrap_secret_creates_no_key(harness: Harness) -> None:
    """An empty secret creates only the default tenant."""
    await harness.keys.install_bootstrap_key('')
    assert (await harness.keys.list('default', Page(size=5))).items == []
