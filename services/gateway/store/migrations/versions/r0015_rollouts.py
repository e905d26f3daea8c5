"""Tables with the rollouts of runs."""

import sqlalchemy as sa
from alembic import op

revision = 'r0015'
down_revision = 'r0014'


def upgrade() -> None:
    """Create the tables `rollout_runs` and `rollout_groups`."""
    op.create_table(
        'rollout_runs',
        sa.Column('tenant_id', sa.String(), primary_key=True),
        sa.Column('run_id', sa.String(), primary_key=True),
        sa.Column('stored_bytes', sa.BigInteger(), nullable=False),
        sa.Column('write_number', sa.BigInteger(), nullable=False),
        sa.Column('removed_group_count', sa.BigInteger(), nullable=False),
        sa.Column('update_time', sa.DateTime(timezone=True), nullable=False),
    )
    # The order of groups in lists must not depend on the locale of the database.
    group_id = sa.String(128).with_variant(sa.String(128, collation='C'), 'postgresql')
    op.create_table(
        'rollout_groups',
        sa.Column('tenant_id', sa.String(), primary_key=True),
        sa.Column('run_id', sa.String(), primary_key=True),
        sa.Column('step', sa.BigInteger(), primary_key=True),
        sa.Column('group_id', group_id, primary_key=True),
        sa.Column('write_number', sa.BigInteger(), nullable=False),
        sa.Column('size_bytes', sa.BigInteger(), nullable=False),
        sa.Column('summary_bytes', sa.BigInteger(), nullable=False),
        sa.Column('content_bytes', sa.BigInteger(), nullable=False),
        sa.Column('update_time', sa.DateTime(timezone=True), nullable=False),
        sa.Column('summaries', sa.LargeBinary(), nullable=False),
        sa.Column('content', sa.LargeBinary(), nullable=False),
    )
    op.create_index('ix_rollout_groups_written', 'rollout_groups', ['tenant_id', 'run_id', 'write_number'])
