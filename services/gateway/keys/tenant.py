"""Who owns things."""

from dataclasses import dataclass
from datetime import datetime

DEFAULT_TENANT = 'default'
"""The tenant of a deployment that nobody has divided."""


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """An owner; it sees its own things and nothing else."""

    tenant_id: str
    """1 to 64 of lower-case letters, digits and '-'."""
    display_name: str
    """For people to read."""
    create_time: datetime
    """UTC."""
