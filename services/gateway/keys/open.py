"""Wires tenants, projects and API keys to a database."""

from dataclasses import dataclass

from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.keys.authenticator import KeyVerifier
from twinkle_services.gateway.keys.keys import Keys
from twinkle_services.gateway.keys.pepper import PepperedHasher, load_pepper
from twinkle_services.gateway.keys.sql import SqlKeyStore, SqlProjectStore, SqlTenantStore
from twinkle_services.gateway.keys.tenants import Projects, Tenants
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import Clock


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


def pepper_of(config: GatewayConfig, *, is_creation_allowed: bool = True) -> bytes:
    """Return the configured pepper, or the one in the state folder; see `load_pepper`."""
    stored = config.pepper_file()
    return bytes.fromhex(config.key_pepper) or load_pepper(stored, is_creation_allowed=is_creation_allowed)
