"""Alembic's entry point: runs the migrations on the connection that `upgrade_schema` passes."""

from alembic import context

context.configure(connection=context.config.attributes['connection'])
context.run_migrations()
