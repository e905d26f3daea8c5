"""Errors about a call itself: its fields, credentials, size, deadline and quotas."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Self

from twinkle_services.kit.errors.base import (
    Aborted,
    DomainError,
    FailedPrecondition,
    FieldViolation,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    domain_error,
)
from twinkle_services.kit.errors.disposition import Code, Disposition


@domain_error('INVALID_FIELD', '{field}: {problem}')
class InvalidField(InvalidArgument):
    """A field is missing, malformed or out of range."""

    field: str
    problem: str

    def metadata(self) -> Mapping[str, str]:
        """Return the field's path; the problem is in the message."""
        return {'field': self.field}

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """The invalid field."""
        return (FieldViolation(self.field, self.problem),)


@domain_error('UNKNOWN_COMPONENT', '{field}: no {kind} is called {name!r}; known: {known}')
class UnknownComponent(InvalidArgument):
    """No component with that name is known."""

    field: str
    kind: str
    name: str
    known: tuple[str, ...] = ()

    def metadata(self) -> Mapping[str, str]:
        """Return all fields, with the known names separated by commas."""
        return {'field': self.field, 'kind': self.kind, 'name': self.name, 'known': ','.join(self.known)}

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """The field that names the component."""
        return (FieldViolation(self.field, f'unknown {self.kind} {self.name!r}'),)


@domain_error(
    'INVALID_PAGE_TOKEN', 'page_token: it was not created by this method for this query; start again without a token'
)
class InvalidPageToken(InvalidArgument):
    """A page token is malformed or does not belong to this query."""

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """The field with the token."""
        return (FieldViolation('page_token', 'was not created by this method for this query'),)


@domain_error(
    'MESSAGE_TOO_LARGE',
    'the message has {size_bytes} bytes, but the limit is {limit_bytes} bytes; send several smaller messages',
)
class MessageTooLarge(ResourceExhausted):
    """A message is larger than the service accepts."""

    size_bytes: int
    limit_bytes: int


@domain_error('CREDENTIALS_MISSING', 'send an API key as "authorization: Bearer <key>"')
class CredentialsMissing(Unauthenticated):
    """The call has no credentials."""


@domain_error('CREDENTIALS_INVALID', 'the API key is not valid; create another one or ask an administrator')
class CredentialsInvalid(Unauthenticated):
    """The API key is unknown, revoked or expired, or the internal token is wrong; the error does not reveal which."""


@domain_error('SCOPE_MISSING', 'the API key lacks the scope {scope!r}; use a key with this scope')
class ScopeMissing(PermissionDenied):
    """The key is valid but lacks a scope."""

    scope: str


@domain_error('SCOPE_MISSING', 'only services of this deployment may call this method; no API key has the right to')
class InternalOnly(PermissionDenied):
    """A client called a method that is for services only."""

    scope: str = 'internal'


@domain_error('PEER_NOT_TRUSTED', 'only services with a trusted certificate may call this method')
class PeerNotTrusted(PermissionDenied):
    """The caller is not a service that may call this method; the error does not reveal which services may."""


@domain_error(
    'REQUEST_ID_REUSED',
    'request_id {request_id!r} was used for a request with other content; choose another id',
    disposition=Disposition.REFUSED,
)
class RequestIdReused(Aborted):
    """A request id was used before, with different content."""

    request_id: str


@domain_error('STREAM_OUT_OF_ORDER', 'the stream should continue with {expected}')
class StreamOutOfOrder(Aborted):
    """A stream's messages arrived in an order that the method does not allow."""

    expected: str
    offset: int | None = None
    """Byte at which to continue; None if the stream does not carry bytes."""

    @classmethod
    def at_byte(cls, offset: int) -> Self:
        """Return the error of a byte stream that should continue at `offset`."""
        return cls(f'a chunk at byte {offset}', offset=offset)


@domain_error(
    'QUEUE_FULL', '{queue_length} requests are queued or running, but the limit is {queue_limit}; retry later'
)
class QueueFull(ResourceExhausted):
    """The tenant has too many queued or running requests."""

    queue_length: int
    queue_limit: int
    wait: timedelta = timedelta(seconds=1)
    """Estimated time until another request is accepted."""

    @property
    def retry_after(self) -> timedelta | None:
        """Estimated time until another request is accepted."""
        return self.wait


@domain_error(
    'QUEUE_FULL',
    'the requests in progress have {queue_length} bytes, but the limit is {queue_limit} bytes; retry later',
)
class BytesFull(QueueFull):
    """The requests in progress have too many bytes. `queue_length` and `queue_limit` are numbers of bytes here."""

    def metadata(self) -> Mapping[str, str]:
        """Return both numbers under keys that distinguish bytes from requests."""
        return {'bytesInFlight': str(self.queue_length), 'bytesLimit': str(self.queue_limit)}


@domain_error(
    'QUOTA_EXCEEDED',
    'the request exceeds quota {quota!r}, which is {limit}; release resources, or wait if the quota limits a rate',
)
class QuotaExceeded(ResourceExhausted):
    """The request would exceed a quota of the tenant."""

    quota: str
    limit: int
    wait: timedelta | None = None
    """Time until the quota refills; None if the tenant must release resources."""

    @property
    def retry_after(self) -> timedelta | None:
        """Time until the quota refills; None if the tenant must release resources."""
        return self.wait


@domain_error('SERVICE_UNREACHABLE', 'the {service} service cannot be reached at the moment; retry later')
class ServiceUnreachable(Unavailable):
    """A service that this one calls cannot be reached. The called service may have received the request."""

    service: str


@domain_error(
    'DISK_FULL',
    'the disk of this service has space for {free_bytes} more bytes, but {needed_bytes} are needed; retry later',
    disposition=Disposition.RETRYABLE,
)
class DiskFull(Unavailable):
    """The disk has too little free space for the request; nothing was stored."""

    free_bytes: int
    needed_bytes: int


@domain_error(
    'DRAINING', 'the service is not ready or is shutting down; retry later', disposition=Disposition.RETRYABLE
)
class Draining(Unavailable):
    """The service is shutting down or not ready yet."""


@domain_error('DEADLINE_PASSED', 'the deadline passed before the response was ready')
class DeadlinePassed(DomainError):
    """The caller's deadline passed before the call finished."""

    code = Code.DEADLINE_EXCEEDED


@domain_error('CANCELLED', 'the call was cancelled')
class Cancelled(DomainError):
    """The caller, or another authorized caller, cancelled the call."""

    code = Code.CANCELLED


@domain_error('NOT_SUPPORTED_HERE', '{what} is not supported by the {engine} engine on this platform')
class NotSupportedHere(FailedPrecondition):
    """The engine or platform of this replica does not support the feature."""

    what: str
    engine: str


@domain_error('NOT_BUILT_YET', '{method} is not implemented yet; GetServerInfo lists the available methods')
class NotBuiltYet(DomainError):
    """The method is in the contract but not implemented yet."""

    code = Code.UNIMPLEMENTED
    method: str


@domain_error('INTERNAL', 'internal error; report it with the request id {request_id}')
class Internal(DomainError):
    """The service has a defect. Its log contains the details, under the request id."""

    code = Code.INTERNAL
    request_id: str
