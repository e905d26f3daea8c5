"""The verb that makes an API key."""

from dataclasses import dataclass, field
from datetime import timedelta

from services.gateway.errors import ProjectNotFound, TenantNotFound
from services.gateway.keys.api_key import ApiKey, Scope, new_secret
from services.gateway.keys.ports import KeyStore, SecretHasher
from services.gateway.keys.tenant_ports import ProjectStore, TenantStore
from services.kit.clock import Clock
from services.kit.ids import new_id


@dataclass(frozen=True, kw_only=True)
class KeyOrder:
    """What key is asked for."""

    tenant_id: str
    scopes: frozenset[Scope]
    display_name: str
    ttl: timedelta | None
    """How long it lasts; None: without end."""
    project_id: str = ''
    """Where its sessions belong that name no project; empty: to none."""


@dataclass(frozen=True, kw_only=True)
class NewKey:
    """A key and its secret, the only time the two are together."""

    key: ApiKey
    secret: str = field(repr=False)


class CreateKey:
    """Makes a key; its secret is hashed before it is kept and shown once."""

    def __init__(
        self, tenants: TenantStore, projects: ProjectStore, keys: KeyStore, *, hasher: SecretHasher, clock: Clock
    ) -> None:
        """Keep keys in `keys`."""
        self._tenants = tenants
        self._projects = projects
        self._keys = keys
        self._hasher = hasher
        self._clock = clock

    async def __call__(self, order: KeyOrder) -> NewKey:
        """Return the key with its secret.

        Raises:
            TenantNotFound: there is no such tenant.
            ProjectNotFound: it has no such project.
        """
        if await self._tenants.get(order.tenant_id) is None:
            raise TenantNotFound(order.tenant_id)
        if order.project_id and await self._projects.get(order.tenant_id, order.project_id) is None:
            raise ProjectNotFound(order.project_id)
        now = self._clock.now()
        key = ApiKey(
            key_id=new_id('key'),
            tenant_id=order.tenant_id,
            scopes=order.scopes,
            display_name=order.display_name,
            create_time=now,
            expire_time=None if order.ttl is None else now + order.ttl,
            project_id=order.project_id,
        )
        secret = new_secret(key.key_id)
        await self._keys.add(key, digest=self._hasher.digest(secret))
        return NewKey(key=key, secret=secret)
