"""Operations on API keys, and the wiring of tenants, projects and keys to a database."""

from dataclasses import dataclass
from datetime import timedelta

from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.credentials import Scope
from twinkle_services.gateway.errors import KeyNotFound
from twinkle_services.gateway.keys.authenticator import KeyVerifier
from twinkle_services.gateway.keys.pepper import PepperedHasher, pepper_of
from twinkle_services.gateway.keys.rules import DEFAULT_TENANT, ApiKey, IssuedKey, KeyRequest, new_secret
from twinkle_services.gateway.keys.sql import SqlKeyStore, SqlProjectStore, SqlTenantStore
from twinkle_services.gateway.keys.tenants import Projects, Tenants
from twinkle_services.gateway.paging import Listing, Page
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.ids import new_id

_BOOTSTRAP_ID_DIGITS = 16
"""Number of hexadecimal digits of the secret's digest in the id of the bootstrap key; equal secrets have equal ids."""


class Keys:
    """Creates, lists, rotates and revokes API keys. Only digests of secrets are stored.

    Methods raise TenantNotFound, ProjectNotFound or KeyNotFound for an id that does not exist.
    """

    def __init__(
        self, store: SqlKeyStore, tenants: Tenants, projects: Projects, *, verifier: KeyVerifier, clock: Clock
    ) -> None:
        self._store = store
        self._tenants = tenants
        self._projects = projects
        self._verifier = verifier
        self._clock = clock

    async def create(self, request: KeyRequest) -> IssuedKey:
        """Create a key and return it with its secret."""
        await self._tenants.check(request.tenant_id)
        await self._projects.check(request.tenant_id, request.project_id)
        now = self._clock.now()
        key = ApiKey(
            key_id=new_id('key'),
            tenant_id=request.tenant_id,
            scopes=request.scopes,
            display_name=request.display_name,
            create_time=now,
            expire_time=None if request.ttl is None else now + request.ttl,
            project_id=request.project_id,
        )
        secret = new_secret(key.key_id)
        await self._store.add(key, digest=self._verifier.digest(secret))
        return IssuedKey(key=key, secret=secret)

    async def install_bootstrap_key(self, secret: str) -> None:
        """Create the default tenant and, unless `secret` is empty, a key of this tenant with all scopes.

        Idempotency: repeating the call with the same secret changes nothing, even if the key has been revoked.
        """
        await self._tenants.create(DEFAULT_TENANT, display_name='Default tenant')
        if secret:
            digest = self._verifier.digest(secret)
            key = ApiKey(
                key_id=f'key-{digest.hex()[:_BOOTSTRAP_ID_DIGITS]}',
                tenant_id=DEFAULT_TENANT,
                scopes=frozenset(Scope),
                display_name='Bootstrap key',
                create_time=self._clock.now(),
            )
            await self._store.add(key, digest=digest)

    async def list(self, tenant_id: str, page: Page) -> Listing[ApiKey]:
        """Return one page of a tenant's keys, newest first."""
        await self._tenants.check(tenant_id)
        return await self._store.list_newest(tenant_id, page)

    async def has_valid_key(self, tenant_id: str) -> bool:
        """Return whether a tenant has a key that is valid now."""
        return await self._store.has_valid(tenant_id, moment=self._clock.now())

    async def rotate(self, key_id: str, *, overlap: timedelta) -> IssuedKey:
        """Create a key with the same rights. The old key stays valid for up to `overlap`, so that its users can switch.

        Raises:
            KeyEnded: the key is no longer valid.
        """
        now, successor_id = self._clock.now(), new_id('key')
        secret = new_secret(successor_id)
        rotation = await self._store.replace(
            key_id,
            lambda key: key.rotated(successor_id, moment=now, overlap=overlap),
            digest=self._verifier.digest(secret),
        )
        self._verifier.clear()
        if rotation is None:
            raise KeyNotFound(key_id)
        return IssuedKey(key=rotation.successor, secret=secret, replaced=rotation.retired)

    async def revoke(self, key_id: str) -> ApiKey:
        """Revoke a key and return it; revoking it again changes nothing."""
        key = await self._store.revoke(key_id, moment=self._clock.now())
        self._verifier.clear()
        if key is None:
            raise KeyNotFound(key_id)
        return key


@dataclass(frozen=True)
class Accounts:
    """Operations on tenants, their projects and their API keys."""

    tenants: Tenants
    projects: Projects
    keys: Keys
    verifier: KeyVerifier


async def open_keys(config: GatewayConfig, database: Database, *, clock: Clock) -> Accounts:
    """Create the default tenant and the configured bootstrap key in `database`, and return the operations on accounts.

    Raises:
        PepperUnusable: the pepper of the stored keys is missing or damaged.
    """
    store = SqlKeyStore(database)
    hasher = PepperedHasher(pepper_of(config, is_creation_allowed=not await store.has_keys()))
    verifier = KeyVerifier(store, hasher=hasher, clock=clock, memory=config.key_memory)
    tenants = Tenants(SqlTenantStore(database), clock=clock)
    projects = Projects(SqlProjectStore(database), tenants, clock=clock)
    keys = Keys(store, tenants, projects, verifier=verifier, clock=clock)
    await keys.install_bootstrap_key(config.bootstrap_key)
    return Accounts(tenants, projects, keys, verifier)
