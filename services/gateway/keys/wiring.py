"""Puts together what administrators do with tenants, projects and keys."""

from services.gateway.keys.create_key import CreateKey
from services.gateway.keys.create_project import CreateProject
from services.gateway.keys.create_tenant import CreateTenant
from services.gateway.keys.list_keys import ListKeys
from services.gateway.keys.list_projects import ListProjects
from services.gateway.keys.list_tenants import ListTenants
from services.gateway.keys.ports import SecretHasher
from services.gateway.keys.revoke_key import RevokeKey
from services.gateway.keys.rotate_key import RotateKey
from services.gateway.keys.servicer import KeyServicer, KeyVerbs
from services.gateway.keys.sql import SqlKeyStore
from services.gateway.keys.sql_projects import SqlProjectStore
from services.gateway.keys.sql_tenants import SqlTenantStore
from services.gateway.keys.verify_key import VerifyKey
from services.gateway.store.database import Database
from services.kit.clock import Clock


def key_servicer(database: Database, *, hasher: SecretHasher, verify: VerifyKey, clock: Clock) -> KeyServicer:
    """Return the servicer, on the stores of `database`; `verify` forgets what changes."""
    tenants, projects, keys = SqlTenantStore(database), SqlProjectStore(database), SqlKeyStore(database)
    return KeyServicer(
        KeyVerbs(
            create_tenant=CreateTenant(tenants, clock=clock),
            list_tenants=ListTenants(tenants),
            create_project=CreateProject(tenants, projects, clock=clock),
            list_projects=ListProjects(tenants, projects),
            create_key=CreateKey(tenants, projects, keys, hasher=hasher, clock=clock),
            list_keys=ListKeys(tenants, keys),
            rotate_key=RotateKey(keys, hasher=hasher, verify=verify, clock=clock),
            revoke_key=RevokeKey(keys, verify=verify, clock=clock),
        )
    )
