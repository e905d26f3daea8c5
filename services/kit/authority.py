"""Who may do what: the checks that verbs begin with.

The gateway checks scopes by method before a call gets here; verbs check again, since a service may
also be reached directly inside a cluster.
"""

from services.kit.caller import Caller
from services.kit.errors import ScopeMissing


def require_scope(caller: Caller, scope: str) -> None:
    """Refuse whoever lacks a scope; services of this deployment need none.

    Args:
        caller: who asks.
        scope: among those of `Caller.scopes`.

    Raises:
        ScopeMissing: the key is not enough.
    """
    if not caller.is_internal and scope not in caller.scopes:
        raise ScopeMissing(scope)


def require_internal(caller: Caller) -> None:
    """Refuse whoever is not a service of this deployment.

    Raises:
        ScopeMissing: the call comes from a client.
    """
    if not caller.is_internal:
        raise ScopeMissing('internal')
