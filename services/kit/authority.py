"""Authorization checks of the application layer.

The gateway checks the scopes of each method before it forwards a call. The services check again, because they can also
be called directly inside a cluster.
"""

from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import InternalOnly, ScopeMissing


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
