"""Which failures pass by themselves, so that whoever can wait tries again."""

from services.kit.errors import Code, DomainError

_CODES = {Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED}


def is_passing(error: DomainError) -> bool:
    """Say whether the same call may succeed later: a service is away or has its hands full."""
    return error.code in _CODES or error.reason == 'QUEUE_FULL'
