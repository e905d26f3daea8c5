"""Sessions that ended and were looked after."""

import sqlalchemy as sa
from alembic import op

revision = 'r0009'
down_revision = 'r0008'


def upgrade() -> None:
    """Add the mark, what was saved, and the index that finds what is to be done."""
    # Those that ended before are settled once more, which finds nothing: their adapters name no session.
    op.add_column('sessions', sa.Column('is_settled', sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column('sessions', sa.Column('checkpoint_paths', sa.JSON(), nullable=False, server_default='[]'))
    op.create_index('ix_sessions_unsettled', 'sessions', ['is_settled', 'heartbeat_time', 'session_id'])


def downgrade() -> None:
    """Drop them."""
    op.drop_index('ix_sessions_unsettled', 'sessions')
    op.drop_column('sessions', 'checkpoint_paths')
    op.drop_column('sessions', 'is_settled')
