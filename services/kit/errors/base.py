"""The base of all domain errors, their families by status code, and the decorator that declares them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import ClassVar, TypeVar, cast, dataclass_transform

from twinkle.errors import error_class
from twinkle_services.kit.errors.disposition import Code, Disposition, disposition_by_code

_Error = TypeVar('_Error', bound='DomainError')


@dataclass(frozen=True)
class FieldViolation:
    """An invalid field of a request."""

    field: str
    """Path from the request, such as `operation.forward_backward.batch.features[2].labels`."""
    problem: str
    """Description of the problem and its fix."""


@dataclass(eq=False)
class DomainError(Exception):
    """Base class of all errors that callers may see. `domain_error` declares subclasses with a fixed reason."""

    code: ClassVar[Code]
    reason: ClassVar[str]
    _disposition = cast('Disposition | None', None)

    def metadata(self) -> Mapping[str, str]:
        """Return the integers and the non-empty strings among the fields, as strings with lowerCamelCase keys."""
        pairs = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {_camel(name): str(value) for name, value in pairs if isinstance(value, str | int) and value != ''}

    @property
    def disposition(self) -> Disposition:
        """Assumption that the caller may make about the request.

        A value that was set on this error takes precedence over the value of its class. Without both, the default of
        the status code applies.
        """
        return self._disposition or disposition_by_code(self.code, has_retry_time=self.retry_after is not None)

    @disposition.setter
    def disposition(self, value: Disposition) -> None:
        self._disposition = value

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """Invalid fields of the request; empty if the error is not about fields."""
        return ()

    @property
    def retry_after(self) -> timedelta | None:
        """Time after which to retry; None if it is unknown or retrying does not help."""
        return None


def _camel(name: str) -> str:
    head, *tail = name.split('_')
    return head + ''.join(word.capitalize() for word in tail)


@dataclass_transform(eq_default=False, field_specifiers=(field,))
def domain_error(
    reason: str, message: str = '', *, disposition: Disposition | None = None
) -> Callable[[type[_Error]], type[_Error]]:
    """Declare a domain error: a dataclass that has a message and metadata, and that can be pickled.

    Args:
        reason: Name in `twinkle.api.error.v1.ErrorReason`, without the prefix.
        message: Format string over the fields, as for `twinkle.errors.error_class`.
        disposition: Assumption that the caller may make; None for the default of the status code.
    """

    def declare(cls: type[_Error]) -> type[_Error]:
        type.__setattr__(cls, 'reason', reason)
        if disposition is not None:
            type.__setattr__(cls, '_disposition', disposition)
        return error_class(message)(cls)

    return declare


class InvalidArgument(DomainError):
    """The request is invalid, independent of the service's state."""

    code = Code.INVALID_ARGUMENT


class NotFound(DomainError):
    """The caller has no resource with that name."""

    code = Code.NOT_FOUND


class AlreadyExists(DomainError):
    """The name or id is in use."""

    code = Code.ALREADY_EXISTS


class Aborted(DomainError):
    """The call lost a race or contradicts an earlier call."""

    code = Code.ABORTED


class FailedPrecondition(DomainError):
    """The current state does not allow the request."""

    code = Code.FAILED_PRECONDITION


class PermissionDenied(DomainError):
    """The credentials are valid but do not allow the request."""

    code = Code.PERMISSION_DENIED


class Unauthenticated(DomainError):
    """The credentials are missing or invalid."""

    code = Code.UNAUTHENTICATED


class DataLoss(DomainError):
    """Bytes are damaged or lost."""

    code = Code.DATA_LOSS


class ResourceExhausted(DomainError):
    """A limit is reached."""

    code = Code.RESOURCE_EXHAUSTED


class Unavailable(DomainError):
    """The request cannot be served at the moment; retry after `retry_after`."""

    code = Code.UNAVAILABLE

    @property
    def retry_after(self) -> timedelta | None:
        """One second, unless the class overrides it."""
        return timedelta(seconds=1)


def all_error_classes() -> list[type[DomainError]]:
    """Return every loaded error class that declares a reason, ordered by name and module."""
    found: list[type[DomainError]] = []
    pending = [DomainError]
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        if 'reason' in vars(cls):
            found.append(cls)
    return sorted(found, key=lambda cls: (cls.__name__, cls.__module__))
