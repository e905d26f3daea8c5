"""Which checkpoints every tenant may read."""

import sqlalchemy as sa
from alembic import op

revision = 'r0004'
down_revision = 'r0003'


def upgrade() -> None:
    """Add the mark."""
    # What the catalogue knew before is told anew by the checkpoint service at every start.
    op.add_column('checkpoints', sa.Column('is_public', sa.Boolean(), nullable=False, server_default=sa.false()))


def downgrade() -> None:
    """Drop the mark."""
    op.drop_column('checkpoints', 'is_public')
