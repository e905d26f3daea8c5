"""Tables with the metrics of runs."""

import sqlalchemy as sa
from alembic import op

revision = 'r0013'
down_revision = 'r0012'


def upgrade() -> None:
    """Create the tables `metric_runs` and `metric_chunks`."""
    op.create_table(
        'metric_runs',
        sa.Column('tenant_id', sa.String(), primary_key=True),
        sa.Column('run_id', sa.String(), primary_key=True),
        sa.Column('point_count', sa.BigInteger(), nullable=False),
        sa.Column('name_count', sa.BigInteger(), nullable=False),
        sa.Column('update_time', sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        'metric_chunks',
        sa.Column('tenant_id', sa.String(), primary_key=True),
        sa.Column('run_id', sa.String(), primary_key=True),
        sa.Column('name', sa.String(128), primary_key=True),
        sa.Column('chunk', sa.BigInteger(), primary_key=True),
        sa.Column('points', sa.LargeBinary(), nullable=False),
    )
