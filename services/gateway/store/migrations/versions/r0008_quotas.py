"""Quotas, and what was used."""

import sqlalchemy as sa
from alembic import op

revision = 'r0008'
down_revision = 'r0007'

_COUNTS = ('trained_token_count', 'sampled_token_count', 'prompt_token_count', 'operation_count', 'prompt_count')


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        'quotas',
        sa.Column('tenant_id', sa.String(64), sa.ForeignKey('tenants.tenant_id'), primary_key=True),
        sa.Column('max_adapters', sa.BigInteger()),
        sa.Column('tokens_per_second', sa.BigInteger()),
        sa.Column('burst_tokens', sa.BigInteger()),
        sa.Column('concurrent_samples', sa.BigInteger()),
        sa.Column('stored_bytes', sa.BigInteger()),
        sa.Column('weight', sa.Double[float]()),
    )
    op.create_table(
        'usage',
        sa.Column('tenant_id', sa.String(), primary_key=True),
        sa.Column('run_id', sa.String(), primary_key=True),
        sa.Column('hour', sa.DateTime(timezone=True), primary_key=True),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _COUNTS),
    )
    op.create_table(
        'usage_meters',
        sa.Column('tenant_id', sa.String(), primary_key=True),
        sa.Column('run_id', sa.String(), primary_key=True),
        sa.Column('trained_token_count', sa.BigInteger(), nullable=False),
        sa.Column('operation_count', sa.BigInteger(), nullable=False),
    )
    op.create_table(
        'usage_writers',
        sa.Column('writer_id', sa.String(64), primary_key=True),
        sa.Column('number', sa.BigInteger(), nullable=False),
    )


def downgrade() -> None:
    """Drop them."""
    for name in ('usage_writers', 'usage_meters', 'usage', 'quotas'):
        op.drop_table(name)
