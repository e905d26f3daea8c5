"""Futures."""

import sqlalchemy as sa
from alembic import op

revision = 'r0002'
down_revision = 'r0001'

_MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        'futures',
        sa.Column('future_id', sa.String(64), primary_key=True),
        sa.Column('tenant_id', sa.String(), nullable=False),
        sa.Column('session_id', sa.String(), nullable=False),
        sa.Column('kind', sa.String(), nullable=False),
        sa.Column('key', sa.String(), nullable=False),
        sa.Column('lane', sa.String(), nullable=False),
        sa.Column('position', sa.BigInteger(), nullable=False),
        sa.Column('note', sa.String(), nullable=False),
        sa.Column('fingerprint', sa.String(), nullable=False),
        sa.Column('state', sa.String(16), nullable=False),
        sa.Column('create_time', _MOMENT, nullable=False),
        sa.Column('number', sa.BigInteger()),
        sa.Column('finish_time', _MOMENT),
        sa.Column('error', sa.LargeBinary()),
    )
    op.create_index('ix_futures_lane', 'futures', ['tenant_id', 'lane', 'position'])
    op.create_index('ix_futures_state', 'futures', ['state', 'finish_time'])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table('futures')
