"""Errors about a call itself: its fields, credentials, size, time and place in the queue."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from services.kit.errors.base import (
    Aborted,
    Code,
    DomainError,
    FailedPrecondition,
    FieldViolation,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)


@dataclass(eq=False)
class InvalidField(InvalidArgument):
    """A field is missing, malformed or out of range."""

    reason = 'INVALID_FIELD'
    field: str
    problem: str

    def __str__(self) -> str:
        return f'{self.field}: {self.problem}'

    def metadata(self) -> Mapping[str, str]:
        """Return the field's path; the problem is in the message."""
        return {'field': self.field}

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """The one field."""
        return (FieldViolation(self.field, self.problem),)


@dataclass(eq=False)
class UnknownComponent(InvalidArgument):
    """No component of that name is known."""

    reason = 'UNKNOWN_COMPONENT'
    field: str
    kind: str
    name: str
    known: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f'{self.field}: no {self.kind} is called {self.name!r}; known are {", ".join(self.known) or "none"}'

    def metadata(self) -> Mapping[str, str]:
        """Return kind, name and what is known."""
        return {'field': self.field, 'kind': self.kind, 'name': self.name, 'known': ','.join(self.known)}

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """The field that names it."""
        return (FieldViolation(self.field, f'unknown {self.kind} {self.name!r}'),)


@dataclass(eq=False)
class InvalidPageToken(InvalidArgument):
    """A page token is not one of this query."""

    reason = 'INVALID_PAGE_TOKEN'

    def __str__(self) -> str:
        return 'page_token: not made by this method for this query; begin again with an empty one'

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """The token."""
        return (FieldViolation('page_token', 'not made by this method for this query'),)


@dataclass(eq=False)
class MessageTooLarge(ResourceExhausted):
    """A message is larger than the service accepts."""

    reason = 'MESSAGE_TOO_LARGE'
    size_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        return f'the message has {self.size_bytes} bytes, the limit is {self.limit_bytes}; send it in smaller parts'


@dataclass(eq=False)
class CredentialsMissing(Unauthenticated):
    """No credentials came with the call."""

    reason = 'CREDENTIALS_MISSING'

    def __str__(self) -> str:
        return 'send an API key as "authorization: Bearer <key>"'


@dataclass(eq=False)
class CredentialsInvalid(Unauthenticated):
    """The key is unknown, revoked or expired; which, is not told."""

    reason = 'CREDENTIALS_INVALID'

    def __str__(self) -> str:
        return 'the API key is not valid'


@dataclass(eq=False)
class ScopeMissing(PermissionDenied):
    """The key is good but lacks a scope."""

    reason = 'SCOPE_MISSING'
    scope: str

    def __str__(self) -> str:
        return f'the API key lacks the scope {self.scope!r}'


@dataclass(eq=False)
class PeerNotTrusted(PermissionDenied):
    """The call did not come from a service that may call this one; from which it came, is not told."""

    reason = 'PEER_NOT_TRUSTED'

    def __str__(self) -> str:
        return 'only services whose certificate is trusted here may call this'


@dataclass(eq=False)
class RequestIdReused(Aborted):
    """A request id came again with other content."""

    reason = 'REQUEST_ID_REUSED'
    request_id: str

    def __str__(self) -> str:
        return f'request_id {self.request_id!r} was used for a request with other content'


@dataclass(eq=False)
class StreamOutOfOrder(Aborted):
    """A stream's messages came in an order the method does not allow."""

    reason = 'STREAM_OUT_OF_ORDER'
    expected: str
    offset: int | None = None
    """The byte to go on from; None: it is not about bytes."""

    @classmethod
    def at_byte(cls, offset: int) -> Self:
        """Return the error of a stream of bytes that should go on at `offset`."""
        return cls(f'a chunk at byte {offset}', offset=offset)

    def __str__(self) -> str:
        return f'the stream should continue with {self.expected}'


@dataclass(eq=False)
class QueueFull(ResourceExhausted):
    """The tenant's queue is full."""

    reason = 'QUEUE_FULL'
    queue_length: int
    queue_limit: int
    wait: timedelta = timedelta(seconds=1)
    """Until there may be a place, as far as can be told."""

    def __str__(self) -> str:
        return f'{self.queue_length} requests wait already, the limit is {self.queue_limit}; try again later'

    @property
    def retry_after(self) -> timedelta | None:
        """When there may be a place."""
        return self.wait


@dataclass(eq=False)
class BytesFull(QueueFull):
    """The tenant has as many bytes under way as it may, or all have. Lengths are bytes."""

    def __str__(self) -> str:
        return f'{self.queue_length} bytes of requests are under way, the limit is {self.queue_limit}; try again later'

    def metadata(self) -> Mapping[str, str]:
        """Return the lengths by names that tell them from those of a queue of requests."""
        return {'bytesInFlight': str(self.queue_length), 'bytesLimit': str(self.queue_limit)}


@dataclass(eq=False)
class QuotaExceeded(ResourceExhausted):
    """A quota of the tenant is used up."""

    reason = 'QUOTA_EXCEEDED'
    quota: str
    limit: int
    wait: timedelta | None = None
    """Until there is something left of it by itself; None where the tenant has to give something back."""

    def __str__(self) -> str:
        return f'quota {self.quota!r} allows {self.limit}'

    @property
    def retry_after(self) -> timedelta | None:
        """When there is something left."""
        return self.wait


@dataclass(eq=False)
class ServiceUnreachable(Unavailable):
    """A service behind this one cannot be reached."""

    reason = 'SERVICE_UNREACHABLE'
    service: str

    def __str__(self) -> str:
        return f'the {self.service} service cannot be reached at the moment'


@dataclass(eq=False)
class Draining(Unavailable):
    """The service is shutting down or not ready yet."""

    reason = 'DRAINING'

    def __str__(self) -> str:
        return 'the service is not ready or shutting down'


@dataclass(eq=False)
class DeadlinePassed(DomainError):
    """The caller's deadline passed first."""

    code = Code.DEADLINE_EXCEEDED
    reason = 'DEADLINE_PASSED'

    def __str__(self) -> str:
        return 'the deadline passed before the answer was ready'


@dataclass(eq=False)
class Cancelled(DomainError):
    """The caller, or another one with the right to, cancelled."""

    code = Code.CANCELLED
    reason = 'CANCELLED'

    def __str__(self) -> str:
        return 'the call was cancelled'


@dataclass(eq=False)
class NotSupportedHere(FailedPrecondition):
    """The engine or platform behind this replica cannot do it."""

    reason = 'NOT_SUPPORTED_HERE'
    what: str
    engine: str

    def __str__(self) -> str:
        return f'{self.what} is not supported by the {self.engine} engine on this platform'


@dataclass(eq=False)
class NotBuiltYet(DomainError):
    """The method is in the contract and not built yet."""

    code = Code.UNIMPLEMENTED
    reason = 'NOT_BUILT_YET'
    method: str

    def __str__(self) -> str:
        return f'{self.method} is not built yet; GetServerInfo lists what is'


@dataclass(eq=False)
class Internal(DomainError):
    """A defect of ours; what it was is in the log under the request id."""

    code = Code.INTERNAL
    reason = 'INTERNAL'
    request_id: str

    def __str__(self) -> str:
        return f'internal error; quote request {self.request_id} in a report'
