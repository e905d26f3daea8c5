"""The session that each run was made in."""

import sqlalchemy as sa
from alembic import op

revision = 'r0011'
down_revision = 'r0010'


def upgrade() -> None:
    """Add the column; the model services tell anew at every start what it holds."""
    op.add_column('runs', sa.Column('session_id', sa.String(), nullable=False, server_default=''))
    op.create_index('ix_runs_session', 'runs', ['tenant_id', 'session_id'])
    # Runs that are gone are told of no more. Ids of the Tinker API's models begin with their session's.
    runs = sa.table('runs', *(sa.column(name, sa.String()) for name in ('tenant_id', 'run_id', 'session_id')))
    found = sa.select(runs.c.tenant_id, runs.c.run_id).where(runs.c.run_id.contains(':train:'))
    connection = op.get_bind()
    for tenant_id, run_id in connection.execute(found).all():
        is_it = (runs.c.tenant_id == tenant_id) & (runs.c.run_id == run_id)
        session_id = run_id.rpartition(':train:')[0]
        connection.execute(sa.update(runs).where(is_it).values(session_id=session_id))


def downgrade() -> None:
    """Drop it."""
    op.drop_index('ix_runs_session', 'runs')
    op.drop_column('runs', 'session_id')
