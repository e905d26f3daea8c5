"""The caller of a method, derived from credentials and never from a field of a request."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The tenant on whose behalf a call is made, and the scopes of its credentials."""

    tenant_id: str
    """Owner of everything that the call may read or create; empty if a service acts for no tenant."""
    key_id: str = ''
    """Public part of the API key; empty for calls inside the cluster without a forwarded key."""
    project_id: str = ''
    """Project of created resources if the request names none; empty for no project."""
    scopes: frozenset[str] = frozenset()
    """Subset of 'train', 'full_parameters', 'sample', 'data', 'operator' and 'admin'."""
    is_internal: bool = False
    """Whether a service of this deployment makes the call itself instead of forwarding a client's call."""
