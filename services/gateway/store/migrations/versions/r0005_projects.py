"""Projects, what belongs to them, and keys that replace others."""

import sqlalchemy as sa
from alembic import op

revision = 'r0005'
down_revision = 'r0004'


def upgrade() -> None:
    """Add the table, and the columns that name what is in it."""
    op.create_table(
        'projects',
        sa.Column('tenant_id', sa.String(64), sa.ForeignKey('tenants.tenant_id'), primary_key=True),
        sa.Column('project_id', sa.String(64), primary_key=True),
        sa.Column('display_name', sa.String(), nullable=False),
        sa.Column('create_time', sa.DateTime(timezone=True), nullable=False),
    )
    op.add_column('api_keys', sa.Column('retire_time', sa.DateTime(timezone=True)))
    op.create_index('ix_projects_newest', 'projects', ['tenant_id', 'create_time', 'project_id'])
    for table, column in (('api_keys', 'project_id'), ('api_keys', 'replaces_key_id'), ('sessions', 'project_id')):
        op.add_column(table, sa.Column(column, sa.String(64), nullable=False, server_default=''))


def downgrade() -> None:
    """Drop them."""
    op.drop_column('api_keys', 'retire_time')
    for table, column in (('sessions', 'project_id'), ('api_keys', 'replaces_key_id'), ('api_keys', 'project_id')):
        op.drop_column(table, column)
    op.drop_table('projects')
