"""Who may do what."""

from services.kit.caller import Caller
from services.kit.errors import ScopeMissing


def require_internal(caller: Caller) -> None:
    """Refuse whoever is not a service of this deployment.

    Raises:
        ScopeMissing: the call comes from a client.
    """
    if not caller.is_internal:
        raise ScopeMissing('internal')


def require_training(caller: Caller) -> None:
    """Refuse whoever may not change checkpoints and versions.

    Raises:
        ScopeMissing: the key lacks the scope.
    """
    if not caller.is_internal and 'train' not in caller.scopes:
        raise ScopeMissing('train')
