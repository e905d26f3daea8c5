"""Who is calling. Always derived from credentials, never from a field of a request."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The tenant on whose behalf a call is made, and what its credentials allow."""

    tenant_id: str
    """Owner of everything the call may see or make."""
    key_id: str = ''
    """Public part of the API key; empty inside the cluster where none was forwarded."""
    project_id: str = ''
    """Where what it begins belongs if it names no project; empty: to none."""
    scopes: frozenset[str] = frozenset()
    """Among 'train', 'sample', 'data', 'operator', 'admin'."""
    is_internal: bool = False
    """True where the call comes straight from a service of this deployment, not forwarded for a client."""
