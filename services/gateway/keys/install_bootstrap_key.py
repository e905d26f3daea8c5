"""The verb that makes the deployment's first key, given in the configuration, work."""

from services.gateway.keys.api_key import ApiKey, every_scope
from services.gateway.keys.ports import KeyStore, SecretHasher
from services.gateway.keys.tenant import DEFAULT_TENANT, Tenant
from services.gateway.keys.tenant_ports import TenantStore
from services.kit.clock import Clock

_KEY_ID_DIGITS = 16
"""Hexadecimal digits of the digest that name the key: the same secret always has the same id."""


class InstallBootstrapKey:
    """Keeps a given secret, hashed, as a key of the default tenant with all scopes.

    Idempotency: the same secret again changes nothing, also when the key was revoked since.
    """

    def __init__(self, tenants: TenantStore, keys: KeyStore, *, hasher: SecretHasher, clock: Clock) -> None:
        """Keep the key in `keys`."""
        self._tenants = tenants
        self._keys = keys
        self._hasher = hasher
        self._clock = clock

    async def __call__(self, secret: str) -> None:
        """Make sure that the default tenant is there and, unless `secret` is empty, its key."""
        now = self._clock.now()
        await self._tenants.add_if_absent(
            Tenant(tenant_id=DEFAULT_TENANT, display_name='Default tenant', create_time=now)
        )
        if secret:
            digest = self._hasher.digest(secret)
            key = ApiKey(
                key_id=f'key-{digest.hex()[:_KEY_ID_DIGITS]}',
                tenant_id=DEFAULT_TENANT,
                scopes=every_scope(),
                display_name='Bootstrap key',
                create_time=now,
            )
            await self._keys.add(key, digest=digest)
