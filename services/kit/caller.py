"""The caller of a method, derived from credentials and never from a field of a request, and checks of its authority.

The gateway checks the scopes of each method before it forwards a call. The services check again, because they can also
be called directly inside a cluster.
"""

from dataclasses import dataclass

from twinkle_services.kit.errors import InternalOnly, ScopeMissing


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


def require_scope(caller: Caller, scope: str) -> None:
    """Check that the caller has a scope. Services of this deployment need no scopes.

    Args:
        caller: Caller of the method.
        scope: Required scope; `Caller.scopes` lists the values.

    Raises:
        ScopeMissing: The caller lacks the scope.
    """
    if not caller.is_internal and scope not in caller.scopes:
        raise ScopeMissing(scope)


def require_internal(caller: Caller) -> None:
    """Check that the caller is a service of this deployment.

    Raises:
        InternalOnly: The call comes from a client.
    """
    if not caller.is_internal:
        raise InternalOnly
