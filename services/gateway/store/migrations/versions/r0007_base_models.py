"""Futures of each base model wait among themselves."""

import sqlalchemy as sa
from alembic import op

revision = 'r0007'
down_revision = 'r0006'


def upgrade() -> None:
    """Add the base model; that of what waits from before is not known."""
    op.add_column('futures', sa.Column('base_model', sa.String(), nullable=False, server_default=''))


def downgrade() -> None:
    """Drop it."""
    op.drop_column('futures', 'base_model')
