"""What every domain error has, and the families by status code."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import IntEnum
from typing import Any, ClassVar


class Code(IntEnum):
    """The status codes of RPC, by their standard numbers."""

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


@dataclass(frozen=True)
class FieldViolation:
    """One field of a request that is wrong."""

    field: str
    """Path from the request, such as `operation.forward_backward.batch.features[2].labels`."""
    problem: str
    """What is wrong and what would be right."""


def _rebuild(error_class: type['DomainError'], state: dict[str, Any]) -> 'DomainError':
    error = error_class.__new__(error_class)
    error.__dict__.update(state)
    return error


@dataclass(eq=False)
class DomainError(Exception):
    """Root of all errors that callers may see. Subclasses are dataclasses and say `str(error)`."""

    code: ClassVar[Code]
    reason: ClassVar[str]

    def metadata(self) -> Mapping[str, str]:
        """Return the fields as strings, keys in lowerCamelCase; empty ones left out."""
        pairs = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {_camel(name): str(value) for name, value in pairs if isinstance(value, str | int) and value != ''}

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """The fields of the request that are wrong; empty where it is not about fields."""
        return ()

    @property
    def retry_after(self) -> timedelta | None:
        """When trying again makes sense; None where it does not."""
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by attributes, so that keyword fields survive a trip between processes."""
        return _rebuild, (type(self), dict(self.__dict__))


def _camel(name: str) -> str:
    head, *tail = name.split('_')
    return head + ''.join(word.capitalize() for word in tail)


class InvalidArgument(DomainError):
    """The request is wrong whatever the state."""

    code = Code.INVALID_ARGUMENT


class NotFound(DomainError):
    """Nothing of that name belongs to the caller."""

    code = Code.NOT_FOUND


class AlreadyExists(DomainError):
    """The name is taken."""

    code = Code.ALREADY_EXISTS


class Aborted(DomainError):
    """The call lost a race or contradicts an earlier one."""

    code = Code.ABORTED


class FailedPrecondition(DomainError):
    """Wrong state now."""

    code = Code.FAILED_PRECONDITION


class PermissionDenied(DomainError):
    """The credentials are good but not enough."""

    code = Code.PERMISSION_DENIED


class Unauthenticated(DomainError):
    """The credentials are missing or no good."""

    code = Code.UNAUTHENTICATED


class DataLoss(DomainError):
    """Bytes arrived other than they were sent."""

    code = Code.DATA_LOSS


class ResourceExhausted(DomainError):
    """Too much at once, or in all."""

    code = Code.RESOURCE_EXHAUSTED


class Unavailable(DomainError):
    """Not now; trying again after `retry_after` makes sense."""

    code = Code.UNAVAILABLE

    @property
    def retry_after(self) -> timedelta | None:
        """One second, unless the error knows better."""
        return timedelta(seconds=1)


def all_error_classes() -> list[type[DomainError]]:
    """Return every error class with a reason that is loaded now, by name."""
    found: dict[str, type[DomainError]] = {}
    waiting = [DomainError]
    while waiting:
        error_class = waiting.pop()
        waiting.extend(error_class.__subclasses__())
        if 'reason' in error_class.__dict__:
            found[error_class.__name__] = error_class
    return [found[name] for name in sorted(found)]
