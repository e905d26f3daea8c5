"""Column with the number of the last stored report of a run."""

import sqlalchemy as sa
from alembic import op

revision = 'r0014'
down_revision = 'r0013'


def upgrade() -> None:
    """Add the column `sequence_number` to the table `metric_runs`."""
    column = sa.Column('sequence_number', sa.BigInteger(), nullable=False, server_default='0')
    op.add_column('metric_runs', column)
