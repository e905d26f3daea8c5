"""The gateway's stores in SQL: SQLite embedded, PostgreSQL by URL, one set of statements for both."""

from services.gateway.backends.sql.browse import SqlBrowser
from services.gateway.backends.sql.catalogue import SqlCheckpointStore, SqlRunStore
from services.gateway.backends.sql.database import Database
from services.gateway.backends.sql.exports import SqlExportStore
from services.gateway.backends.sql.futures import SqlFutureStore
from services.gateway.backends.sql.handles import SqlHandleStore
from services.gateway.backends.sql.keys import SqlKeyStore
from services.gateway.backends.sql.peers import SqlPeers
from services.gateway.backends.sql.projects import SqlProjectStore
from services.gateway.backends.sql.quotas import SqlQuotaStore
from services.gateway.backends.sql.sessions import SqlSessionStore
from services.gateway.backends.sql.tenants import SqlTenantStore
from services.gateway.backends.sql.usage import SqlUsageStore

__all__ = [
    'Database',
    'SqlBrowser',
    'SqlCheckpointStore',
    'SqlExportStore',
    'SqlFutureStore',
    'SqlHandleStore',
    'SqlKeyStore',
    'SqlPeers',
    'SqlProjectStore',
    'SqlQuotaStore',
    'SqlRunStore',
    'SqlSessionStore',
    'SqlTenantStore',
    'SqlUsageStore',
]
