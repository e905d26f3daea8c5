"""Parts of a tenant's work with a name."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True)
class Project:
    """A part of one tenant's work: sessions belong to it, and with them their runs. It divides nothing."""

    tenant_id: str
    """Whose it is."""
    project_id: str
    """1 to 64 of lower-case letters, digits and '-', unique within the tenant."""
    display_name: str
    """For people to read."""
    create_time: datetime
    """UTC."""
