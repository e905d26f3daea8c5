"""Labels and rank of checkpoints, and exports."""

import sqlalchemy as sa
from alembic import op

revision = 'r0010'
down_revision = 'r0009'


def upgrade() -> None:
    """Add the columns, and make the table."""
    op.add_column('checkpoints', sa.Column('user_metadata', sa.JSON(), nullable=False, server_default='{}'))
    op.add_column('checkpoints', sa.Column('lora_rank', sa.BigInteger(), nullable=False, server_default='0'))
    moments = ('create_time', 'update_time', 'due_time')
    op.create_table(
        'exports',
        sa.Column('export_id', sa.String(64), primary_key=True),
        *(sa.Column(name, sa.String(), nullable=False) for name in ('tenant_id', 'request_id', 'checkpoint_path')),
        *(sa.Column(name, sa.String(), nullable=False) for name in ('digest', 'target', 'url', 'commit')),
        sa.Column('is_private', sa.Boolean(), nullable=False),
        sa.Column('sealed_token', sa.LargeBinary(), nullable=False),
        sa.Column('state', sa.String(16), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ('read_bytes', 'size_bytes', 'attempt_count')),
        sa.Column('error', sa.LargeBinary()),
        *(sa.Column(name, sa.DateTime(timezone=True), nullable=False) for name in moments),
        sa.UniqueConstraint('tenant_id', 'request_id', name='uq_exports_request'),
    )
    op.create_index('ix_exports_newest', 'exports', ['tenant_id', 'create_time', 'export_id'])
    op.create_index('ix_exports_due', 'exports', ['state', 'due_time'])


def downgrade() -> None:
    """Drop them."""
    op.drop_table('exports')
    for name in ('lora_rank', 'user_metadata'):
        op.drop_column('checkpoints', name)
