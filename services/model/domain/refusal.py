"""Which failures of an operation leave everything as it was, its number included."""

from services.kit.errors import Code, DomainError

_CODES = {
    Code.CANCELLED,
    Code.INVALID_ARGUMENT,
    Code.NOT_FOUND,
    Code.ALREADY_EXISTS,
    Code.PERMISSION_DENIED,
    Code.RESOURCE_EXHAUSTED,
    Code.UNAVAILABLE,
    Code.UNIMPLEMENTED,
}


def is_refusal(error: object) -> bool:
    """Say whether `error` means that nothing changed, so that the operation's number may be used again."""
    return isinstance(error, DomainError) and error.code in _CODES
