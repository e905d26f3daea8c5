"""Schema history, managed by Alembic. A schema change is a new file in `versions`; released files never change."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

__all__ = ['SchemaNotSupported', 'is_current', 'upgrade_schema']


class SchemaNotSupported(Exception):
    """The database has a schema revision that this release cannot upgrade."""

    def __init__(self, revision: str, head: str) -> None:
        super().__init__(
            f'database_url: the database has schema revision {revision!r}, which this release cannot upgrade to '
            f'{head!r}. Use the release that wrote the database, or a new database.'
        )


def upgrade_schema(connection: Connection) -> None:
    """Apply the migrations that the database lacks, within the connection's transaction.

    Idempotency: an up-to-date schema is left unchanged.
    Concurrency: the caller holds a lock that prevents concurrent upgrades.

    Raises:
        SchemaNotSupported: the database is at an unknown revision, such as one from before the first release.
    """
    config = _config_of(connection)
    scripts = ScriptDirectory.from_config(config)
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision is not None and revision not in {script.revision for script in scripts.walk_revisions()}:
        raise SchemaNotSupported(revision, scripts.get_current_head() or '')
    command.upgrade(config, 'head')


def is_current(connection: Connection) -> bool:
    """Return whether the schema has all migrations of this release."""
    head = ScriptDirectory.from_config(_config_of(connection)).get_current_head()
    return MigrationContext.configure(connection).get_current_revision() == head


def _config_of(connection: Connection) -> Config:
    config = Config()
    config.set_main_option('script_location', str(Path(__file__).parent))
    config.attributes['connection'] = connection
    return config
