"""Status codes, and the assumptions that a caller may make about a failed request."""

from enum import IntEnum, StrEnum


class Code(IntEnum):
    """The status codes of gRPC, by their standard numbers."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Disposition(StrEnum):
    """Assumption that a caller may make about a failed request; see `twinkle.api.error.v1.Disposition`."""

    REFUSED = 'REFUSED'
    """Nothing changed, and an operation's sequence number can be used again. The same request fails again, unless
    something else changes first."""
    RETRYABLE = 'RETRYABLE'
    """Nothing changed, and an operation's sequence number can be used again. The same request may succeed later."""
    FAILED = 'FAILED'
    """The request ran and failed. The sequence number of an operation was used, so repeating the operation returns the
    same error."""
    INTERRUPTED = 'INTERRUPTED'
    """The request may have taken effect. Repeating it with the same sequence number or request id has no second
    effect, and may succeed."""
    UNKNOWN = 'UNKNOWN'
    """The request may have taken effect. Check the state before sending another request."""

    @property
    def frees_number(self) -> bool:
        """Whether nothing changed, so that the sequence number of a failed operation can be used again."""
        return self in {Disposition.REFUSED, Disposition.RETRYABLE}

    @property
    def is_transient(self) -> bool:
        """Whether repeating the same request may succeed."""
        return self in {Disposition.RETRYABLE, Disposition.INTERRUPTED}


_BY_CODE = {
    Code.INVALID_ARGUMENT: Disposition.REFUSED,
    Code.DEADLINE_EXCEEDED: Disposition.INTERRUPTED,
    Code.NOT_FOUND: Disposition.REFUSED,
    Code.ALREADY_EXISTS: Disposition.REFUSED,
    Code.PERMISSION_DENIED: Disposition.REFUSED,
    Code.RESOURCE_EXHAUSTED: Disposition.REFUSED,
    Code.FAILED_PRECONDITION: Disposition.FAILED,
    Code.UNIMPLEMENTED: Disposition.REFUSED,
    Code.UNAVAILABLE: Disposition.INTERRUPTED,
    Code.UNAUTHENTICATED: Disposition.REFUSED,
}


def disposition_by_code(code: Code, *, has_retry_time: bool) -> Disposition:
    """Return the default disposition of a status code.

    Args:
        code: Status code of the failed request.
        has_retry_time: Whether the error has a retry time. RESOURCE_EXHAUSTED is retryable only if it has one.
    """
    if code is Code.RESOURCE_EXHAUSTED and has_retry_time:
        return Disposition.RETRYABLE
    return _BY_CODE.get(code, Disposition.UNKNOWN)
