"""The gateway's stores in SQL: SQLite embedded, PostgreSQL by URL, one set of statements for both."""

from services.gateway.backends.sql.catalogue import SqlCheckpointStore, SqlRunStore
from services.gateway.backends.sql.database import Database
from services.gateway.backends.sql.keys import SqlKeyStore
from services.gateway.backends.sql.sessions import SqlSessionStore
from services.gateway.backends.sql.tenants import SqlTenantStore

__all__ = [
    'Database',
    'SqlCheckpointStore',
    'SqlKeyStore',
    'SqlRunStore',
    'SqlSessionStore',
    'SqlTenantStore',
]
