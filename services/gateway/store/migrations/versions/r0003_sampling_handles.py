"""Sampling handles, and what the ends of futures are told under."""

import sqlalchemy as sa
from alembic import op

revision = 'r0003'
down_revision = 'r0002'

_MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Make the table, the column and its index."""
    op.create_table(
        'sampling_handles',
        sa.Column('tenant_id', sa.String(), primary_key=True),
        sa.Column('handle_id', sa.String(), primary_key=True),
        sa.Column('session_id', sa.String(), nullable=False),
        sa.Column('base_model', sa.String(), nullable=False),
        sa.Column('checkpoint_path', sa.String(), nullable=False),
        sa.Column('adapter_id', sa.String(), nullable=False),
        sa.Column('future_id', sa.String(), nullable=False),
        sa.Column('version', sa.BigInteger()),
        sa.Column('is_inflight', sa.Boolean(), nullable=False),
        sa.Column('clone_count', sa.BigInteger(), nullable=False),
        sa.Column('create_time', _MOMENT, nullable=False),
    )
    op.create_index('ix_sampling_handles_session', 'sampling_handles', ['tenant_id', 'session_id', 'create_time'])
    op.add_column('futures', sa.Column('topic', sa.String(), nullable=False, server_default=''))
    op.create_index('ix_futures_topic', 'futures', ['tenant_id', 'topic', 'finish_time'])


def downgrade() -> None:
    """Drop them."""
    op.drop_index('ix_futures_topic', 'futures')
    op.drop_column('futures', 'topic')
    op.drop_table('sampling_handles')
