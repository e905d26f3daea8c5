"""Revisions of metrics, the number of points of each tenant, and the quota for them."""

import sqlalchemy as sa
from alembic import op

revision = 'r0016'
down_revision = 'r0015'


def upgrade() -> None:
    """Add the columns `revision` and `metric_points`, and the table `metric_tenants` with the points stored so far."""
    for table in ('metric_runs', 'metric_chunks'):
        op.add_column(table, sa.Column('revision', sa.BigInteger(), nullable=False, server_default='0'))
    op.create_index('ix_metric_chunks_revision', 'metric_chunks', ['tenant_id', 'run_id', 'revision'])
    op.add_column('quotas', sa.Column('metric_points', sa.BigInteger(), nullable=True))
    op.create_table(
        'metric_tenants',
        sa.Column('tenant_id', sa.String(), primary_key=True),
        sa.Column('point_count', sa.BigInteger(), nullable=False),
    )
    op.execute(
        'INSERT INTO metric_tenants (tenant_id, point_count) '
        'SELECT tenant_id, SUM(point_count) FROM metric_runs GROUP BY tenant_id'
    )
