"""Table with the metrics of runs."""

import sqlalchemy as sa
from alembic import op

revision = 'r0013'
down_revision = 'r0012'


def upgrade() -> None:
    """Create the table `metric_points`."""
    op.create_table(
        'metric_points',
        sa.Column('tenant_id', sa.String(), primary_key=True),
        sa.Column('run_id', sa.String(), primary_key=True),
        sa.Column('name', sa.String(128), primary_key=True),
        sa.Column('step', sa.BigInteger(), primary_key=True),
        sa.Column('value', sa.Double[float]()),
        sa.Column('record_time', sa.DateTime(timezone=True), nullable=False),
    )
