"""Tables of the first release.

This revision replaces the eleven revisions of development and keeps the id of the last one, so that databases at that
revision can be upgraded. Databases of older development revisions are refused.
"""

import sqlalchemy as sa
from alembic import op

revision = 'r0011'
down_revision = None

_MOMENT = sa.DateTime(timezone=True)
_IS_WAITING = sa.text("state = 'waiting'")


def upgrade() -> None:
    """Create all tables."""
    _create_accounts()
    _create_sessions()
    _create_runs()
    _create_checkpoints()
    _create_futures()
    _create_sampling_handles()
    _create_usage()
    _create_exports()


def _create_accounts() -> None:
    op.create_table(
        'tenants',
        sa.Column('tenant_id', sa.String(64), primary_key=True),
        sa.Column('display_name', sa.String(), nullable=False),
        sa.Column('create_time', _MOMENT, nullable=False),
    )
    op.create_table(
        'projects',
        sa.Column('tenant_id', sa.String(64), sa.ForeignKey('tenants.tenant_id'), primary_key=True),
        sa.Column('project_id', sa.String(64), primary_key=True),
        sa.Column('display_name', sa.String(), nullable=False),
        sa.Column('create_time', _MOMENT, nullable=False),
    )
    op.create_index('ix_projects_newest', 'projects', ['tenant_id', 'create_time', 'project_id'])
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
        sa.Column('project_id', sa.String(64), nullable=False, server_default=''),
        sa.Column('replaces_key_id', sa.String(64), nullable=False, server_default=''),
        sa.Column('retire_time', _MOMENT),
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
        sa.Column('project_id', sa.String(64), nullable=False, server_default=''),
        sa.Column('is_settled', sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column('checkpoint_paths', sa.JSON(), nullable=False, server_default='[]'),
        sa.UniqueConstraint('tenant_id', 'request_id', name='uq_sessions_request'),
    )
    op.create_index('ix_sessions_newest', 'sessions', ['tenant_id', 'create_time', 'session_id'])
    op.create_index('ix_sessions_silent', 'sessions', ['state', 'heartbeat_time'])
    op.create_index('ix_sessions_unsettled', 'sessions', ['is_settled', 'heartbeat_time', 'session_id'])


def _create_runs() -> None:
    op.create_table(
        'runs',
        sa.Column('tenant_id', sa.String(), primary_key=True),
        sa.Column('run_id', sa.String(), primary_key=True),
        sa.Column('base_model', sa.String(), nullable=False),
        sa.Column('lora_rank', sa.BigInteger(), nullable=False),
        sa.Column('step_count', sa.BigInteger(), nullable=False),
        sa.Column('version', sa.BigInteger(), nullable=False),
        sa.Column('user_metadata', sa.JSON(), nullable=False),
        sa.Column('is_active', sa.Boolean(), nullable=False),
        sa.Column('create_time', _MOMENT, nullable=False),
        sa.Column('update_time', _MOMENT, nullable=False),
        sa.Column('session_id', sa.String(), nullable=False, server_default=''),
    )
    op.create_index('ix_runs_newest', 'runs', ['tenant_id', 'create_time', 'run_id'])
    op.create_index('ix_runs_session', 'runs', ['tenant_id', 'session_id'])


def _create_checkpoints() -> None:
    op.create_table(
        'checkpoints',
        sa.Column('tenant_id', sa.String(), primary_key=True),
        sa.Column('checkpoint_id', sa.String(), primary_key=True),
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
        sa.Column('is_public', sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column('user_metadata', sa.JSON(), nullable=False, server_default='{}'),
        sa.Column('lora_rank', sa.BigInteger(), nullable=False, server_default='0'),
        sa.Column('delete_time', _MOMENT),
    )
    op.create_index('ix_checkpoints_newest', 'checkpoints', ['tenant_id', 'create_time', 'checkpoint_id'])


def _create_futures() -> None:
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
        sa.Column('topic', sa.String(), nullable=False, server_default=''),
        sa.Column('base_model', sa.String(), nullable=False, server_default=''),
        sa.Column('owner', sa.String(64), nullable=False, server_default=''),
    )
    op.create_index('ix_futures_lane', 'futures', ['tenant_id', 'lane', 'position'])
    op.create_index('ix_futures_state', 'futures', ['state', 'finish_time'])
    op.create_index('ix_futures_topic', 'futures', ['tenant_id', 'topic', 'finish_time'])
    waiting = ['tenant_id', 'lane', 'owner']
    op.create_index('ix_futures_waiting', 'futures', waiting, postgresql_where=_IS_WAITING, sqlite_where=_IS_WAITING)
    op.create_table(
        'gateways',
        sa.Column('gateway_id', sa.String(64), primary_key=True),
        sa.Column('payload_store_id', sa.String(64), nullable=False),
        sa.Column('heartbeat_time', _MOMENT, nullable=False),
    )


def _create_sampling_handles() -> None:
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


def _create_usage() -> None:
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
        sa.Column('hour', _MOMENT, primary_key=True),
        sa.Column('trained_token_count', sa.BigInteger(), nullable=False),
        sa.Column('sampled_token_count', sa.BigInteger(), nullable=False),
        sa.Column('prompt_token_count', sa.BigInteger(), nullable=False),
        sa.Column('operation_count', sa.BigInteger(), nullable=False),
        sa.Column('prompt_count', sa.BigInteger(), nullable=False),
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


def _create_exports() -> None:
    op.create_table(
        'exports',
        sa.Column('export_id', sa.String(64), primary_key=True),
        sa.Column('tenant_id', sa.String(), nullable=False),
        sa.Column('request_id', sa.String(), nullable=False),
        sa.Column('checkpoint_path', sa.String(), nullable=False),
        sa.Column('digest', sa.String(), nullable=False),
        sa.Column('target', sa.String(), nullable=False),
        sa.Column('is_private', sa.Boolean(), nullable=False),
        sa.Column('sealed_token', sa.LargeBinary(), nullable=False),
        sa.Column('state', sa.String(16), nullable=False),
        sa.Column('read_bytes', sa.BigInteger(), nullable=False),
        sa.Column('size_bytes', sa.BigInteger(), nullable=False),
        sa.Column('attempt_count', sa.BigInteger(), nullable=False),
        sa.Column('url', sa.String(), nullable=False),
        sa.Column('commit', sa.String(), nullable=False),
        sa.Column('error', sa.LargeBinary()),
        sa.Column('create_time', _MOMENT, nullable=False),
        sa.Column('update_time', _MOMENT, nullable=False),
        sa.Column('due_time', _MOMENT, nullable=False),
        sa.UniqueConstraint('tenant_id', 'request_id', name='uq_exports_request'),
    )
    op.create_index('ix_exports_newest', 'exports', ['tenant_id', 'create_time', 'export_id'])
    op.create_index('ix_exports_due', 'exports', ['state', 'due_time'])
