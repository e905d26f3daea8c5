"""Alembic's entry: runs the migrations on the connection that `upgrade_schema` hands over."""

from alembic import context

from services.gateway.store.tables import Base

context.configure(connection=context.config.attributes['connection'], target_metadata=Base.metadata)
context.run_migrations()
