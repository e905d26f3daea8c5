"""Several gateways on one database, and a catalogue in which tenants cannot take each other's ids."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = 'r0006'
down_revision = 'r0005'

_IDS = {'runs': 'run_id', 'checkpoints': 'checkpoint_id'}


def upgrade() -> None:
    """Make the table of gateways, the column that names one, and the keys of the catalogue."""
    op.create_table(
        'gateways',
        sa.Column('gateway_id', sa.String(64), primary_key=True),
        sa.Column('payload_store_id', sa.String(64), nullable=False),
        sa.Column('heartbeat_time', sa.DateTime(timezone=True), nullable=False),
    )
    op.add_column('futures', sa.Column('owner', sa.String(64), nullable=False, server_default=''))
    op.create_index(
        'ix_futures_waiting',
        'futures',
        ['tenant_id', 'lane', 'owner'],
        postgresql_where=sa.text("state = 'waiting'"),
        sqlite_where=sa.text("state = 'waiting'"),
    )
    for table, column in _IDS.items():
        _change_key(table, ['tenant_id', column])


def downgrade() -> None:
    """Drop them; it fails where two tenants have an entry of one id."""
    for table, column in _IDS.items():
        _change_key(table, [column])
    op.drop_index('ix_futures_waiting', 'futures')
    op.drop_column('futures', 'owner')
    op.drop_table('gateways')


def _change_key(table: str, columns: list[str]) -> None:
    name = f'{table}_pkey'
    if op.get_bind().dialect.name == 'postgresql':
        op.drop_constraint(name, table, type_='primary')
        op.create_primary_key(name, table, columns)
        return
    # SQLite changes no key in place: the rows move to another table.
    old = sa.Table(table, sa.MetaData(), autoload_with=op.get_bind())
    indexes = [(str(index.name), [column.name for column in index.columns]) for index in old.indexes]
    op.rename_table(table, f'old_{table}')
    op.create_table(table, *(_copied(column, is_key=column.name in columns) for column in old.columns))
    names = ', '.join(column.name for column in old.columns)
    op.execute(f'INSERT INTO {table} ({names}) SELECT {names} FROM old_{table}')  # noqa: S608 (names of ours)
    op.drop_table(f'old_{table}')
    for index, parts in indexes:
        op.create_index(index, table, parts)


def _copied(column: sa.Column[Any], *, is_key: bool) -> sa.Column[Any]:
    return sa.Column(
        column.name, column.type, primary_key=is_key, nullable=column.nullable, server_default=column.server_default
    )
