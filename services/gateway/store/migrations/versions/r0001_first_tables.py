"""Tenants, API keys, sessions and the catalogue's copies."""

import sqlalchemy as sa
from alembic import op

revision = 'r0001'
down_revision = None

_MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        'tenants',
        sa.Column('tenant_id', sa.String(64), primary_key=True),
        sa.Column('display_name', sa.String(), nullable=False),
        sa.Column('create_time', _MOMENT, nullable=False),
    )
    _create_api_keys()
    _create_sessions()
    _create_runs()
    _create_checkpoints()


def downgrade() -> None:
    """Drop the tables."""
    for table in ('checkpoints', 'runs', 'sessions', 'api_keys', 'tenants'):
        op.drop_table(table)


def _create_api_keys() -> None:
    op.create_table(
        'api_keys',
        sa.Column('key_id', sa.String(64), primary_key=True),
        sa.Column('tenant_id', sa.String(64), sa.ForeignKey('tenants.tenant_id'), nullable=False),
        sa.Column('digest', sa.LargeBinary(32), nullable=False, unique=True),
        sa.Column('scopes', sa.String(256), nullable=False),
        sa.Column('display_name', sa.String(), nullable=False),
        sa.Column('create_time', _MOMENT, nullable=False),
        sa.Column('expire_time', _MOMENT),
        sa.Column('revoke_time', _MOMENT),
    )
    op.create_index('ix_api_keys_newest', 'api_keys', ['tenant_id', 'create_time', 'key_id'])


def _create_sessions() -> None:
    op.create_table(
        'sessions',
        sa.Column('session_id', sa.String(64), primary_key=True),
        sa.Column('tenant_id', sa.String(64), sa.ForeignKey('tenants.tenant_id'), nullable=False),
        sa.Column('request_id', sa.String(), nullable=False),
        sa.Column('state', sa.String(16), nullable=False),
        sa.Column('client', sa.String(), nullable=False),
        sa.Column('user_metadata', sa.JSON(), nullable=False),
        sa.Column('finish_reason', sa.String(16)),
        sa.Column('create_time', _MOMENT, nullable=False),
        sa.Column('heartbeat_time', _MOMENT, nullable=False),
        sa.UniqueConstraint('tenant_id', 'request_id', name='uq_sessions_request'),
    )
    op.create_index('ix_sessions_newest', 'sessions', ['tenant_id', 'create_time', 'session_id'])
    op.create_index('ix_sessions_silent', 'sessions', ['state', 'heartbeat_time'])


def _create_runs() -> None:
    op.create_table(
        'runs',
        sa.Column('run_id', sa.String(), primary_key=True),
        sa.Column('tenant_id', sa.String(), nullable=False),
        sa.Column('base_model', sa.String(), nullable=False),
        sa.Column('lora_rank', sa.BigInteger(), nullable=False),
        sa.Column('step_count', sa.BigInteger(), nullable=False),
        sa.Column('version', sa.BigInteger(), nullable=False),
        sa.Column('user_metadata', sa.JSON(), nullable=False),
        sa.Column('is_active', sa.Boolean(), nullable=False),
        sa.Column('create_time', _MOMENT, nullable=False),
        sa.Column('update_time', _MOMENT, nullable=False),
    )
    op.create_index('ix_runs_newest', 'runs', ['tenant_id', 'create_time', 'run_id'])


def _create_checkpoints() -> None:
    op.create_table(
        'checkpoints',
        sa.Column('checkpoint_id', sa.String(), primary_key=True),
        sa.Column('tenant_id', sa.String(), nullable=False),
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('name', sa.String(), nullable=False),
        sa.Column('path', sa.String(), nullable=False),
        sa.Column('base_model', sa.String(), nullable=False),
        sa.Column('is_optimizer_included', sa.Boolean(), nullable=False),
        sa.Column('size_bytes', sa.BigInteger(), nullable=False),
        sa.Column('step_count', sa.BigInteger(), nullable=False),
        sa.Column('digest', sa.String(), nullable=False),
        sa.Column('folder', sa.String(), nullable=False),
        sa.Column('create_time', _MOMENT, nullable=False),
        sa.Column('expire_time', _MOMENT),
        sa.Column('delete_time', _MOMENT),
    )
    op.create_index('ix_checkpoints_newest', 'checkpoints', ['tenant_id', 'create_time', 'checkpoint_id'])
