"""Brings a database's schema up to date."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection


def upgrade_schema(connection: Connection) -> None:
    """Apply the migrations that the database lacks, inside the connection's transaction.

    Idempotency: a schema that is up to date stays as it is.
    Concurrency: the caller holds a lock that keeps others from doing the same.
    """
    config = Config()
    config.set_main_option('script_location', str(Path(__file__).parent))
    config.attributes['connection'] = connection
    command.upgrade(config, 'head')
