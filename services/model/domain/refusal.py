"""Decides whether a failed operation frees its sequence number, and what its caller may assume."""

from services.kit.errors import Code, Disposition, DomainError

_UNAPPLIED = {Code.CANCELLED, Code.UNAVAILABLE}
"""Codes of operations that were cancelled or that another service could not process; nothing was applied."""


def is_refusal(error: object) -> bool:
    """Return whether `error` means that nothing changed, so that the operation's number can be used again."""
    return isinstance(error, DomainError) and (error.disposition.frees_number or error.code in _UNAPPLIED)


def outcome_disposition(error: DomainError) -> Disposition:
    """Return the disposition that a caller may assume for an operation that failed with `error`."""
    if not is_refusal(error):
        return Disposition.FAILED
    return Disposition.RETRYABLE if error.disposition.is_transient else Disposition.REFUSED
