"""Table with the model service to which each request for a new adapter was assigned."""

import sqlalchemy as sa
from alembic import op

revision = 'r0012'
down_revision = 'r0011'


def upgrade() -> None:
    """Create the table `creations`."""
    op.create_table(
        'creations',
        sa.Column('tenant_id', sa.String(), primary_key=True),
        sa.Column('base_model', sa.String(), primary_key=True),
        sa.Column('creation_key', sa.String(), primary_key=True),
        sa.Column('trainer_id', sa.String(), nullable=False),
    )
