"""The schema's history, by Alembic. A new table or column is a new file in `versions`, never a change to an old one."""

from services.gateway.store.migrations.upgrade import upgrade_schema

__all__ = ['upgrade_schema']
