"""Errors of failed calls, with one class for each way in which a program may react.

Error:
 ├─ RetryableError > BusyError    retry after `retry_after`, if it is set; the client has already retried
 ├─ UsageError > NotFoundError, ConflictError, StateError, QuotaError, NotSupportedError
 ├─ AccessError                   the API key is missing, unknown, or lacks a scope
 ├─ DeadlineError                 no response in time; also a TimeoutError
 ├─ CancelledError                the request was cancelled, by this or another authorized client
 └─ ServerError                   a defect of the service, or data that was damaged in transit or in storage
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

__all__ = [
    'AccessError',
    'BusyError',
    'CancelledError',
    'ConflictError',
    'DeadlineError',
    'Disposition',
    'Error',
    'FieldViolation',
    'NotFoundError',
    'NotSupportedError',
    'QuotaError',
    'RetryableError',
    'ServerError',
    'StateError',
    'UsageError',
    'error_from_rpc',
    'error_from_status',
]

_DISPOSITION_KEY = 'disposition'
_STATUS_KEY = 'grpc-status-details-bin'
_REQUEST_ID_KEY = 'x-request-id'


class Disposition(StrEnum):
    """Effect of a failed request, and whether the request may be repeated."""

    REFUSED = 'REFUSED'
    """Nothing changed. The same request fails again while the state of the server stays the same."""
    RETRYABLE = 'RETRYABLE'
    """Nothing changed. The same request may succeed later."""
    FAILED = 'FAILED'
    """The request was executed and failed; repeating it returns the same error."""
    INTERRUPTED = 'INTERRUPTED'
    """The request may have taken effect. Repeating it with the same id may succeed and has no second effect."""
    UNKNOWN = 'UNKNOWN'
    """The request may have taken effect. Check the state before sending another request."""


@dataclass(frozen=True)
class FieldViolation:
    """An invalid field of the request."""

    field: str
    """Path, such as `operation.forward_backward.batch.features[2].labels`."""
    problem: str


@dataclass(frozen=True, kw_only=True)
class ErrorFacts:
    """Properties of a failed call."""

    code: grpc.StatusCode
    message: str
    reason: str = ''
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    violations: tuple[FieldViolation, ...] = ()
    request_id: str = ''
    retry_after: timedelta | None = None
    disposition: Disposition | None = None
    """Disposition that the server sent; None if the server sent no disposition."""


class Error(Exception):
    """A call failed. `str()` is a message for people; the attributes are for programs."""

    def __init__(self, facts: ErrorFacts) -> None:
        super().__init__(facts)
        self._facts = facts

    def __str__(self) -> str:
        parts = [self._facts.message or self._facts.code.name]
        parts += [f'{item.field}: {item.problem}' for item in self.violations if item.field not in parts[0]]
        label = self._facts.reason or self._facts.code.name
        suffix = f', request {self.request_id}' if self.request_id else ''
        return f'{"; ".join(parts)} [{label}{suffix}]'

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code."""
        return self._facts.code

    @property
    def message(self) -> str:
        """The server's description of the problem, without reason and request id."""
        return self._facts.message

    @property
    def reason(self) -> str:
        """Name of an `ErrorReason` without its prefix; empty if the transport failed."""
        return self._facts.reason

    @property
    def metadata(self) -> Mapping[str, str]:
        """Details of the reason by name, such as `adapterId`."""
        return self._facts.metadata

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """Invalid fields of the request."""
        return self._facts.violations

    @property
    def request_id(self) -> str:
        """Id of the call, which helps the operator to find it in the logs."""
        return self._facts.request_id

    @property
    def retry_after(self) -> timedelta | None:
        """Time after which to retry; None if the server did not specify a time."""
        return self._facts.retry_after

    @property
    def disposition(self) -> Disposition:
        """Whether the request took effect and may be repeated, as reported by the server or else implied by `code`."""
        return self._facts.disposition or _disposition_by_code(self._facts)


class RetryableError(Error):
    """The service cannot serve the request now; the same request may succeed later."""


class BusyError(RetryableError):
    """A queue is full, or a rate limit is reached; retry after `retry_after`."""


class UsageError(Error):
    """The request cannot succeed without a change."""


class NotFoundError(UsageError):
    """The caller has no such resource."""


class ConflictError(UsageError):
    """The id, name or number is in use, or another writer changed the resource first."""


class StateError(UsageError):
    """The call requires another state; the message names the required earlier step."""


class QuotaError(UsageError):
    """A quota or size limit is reached, and waiting alone does not help."""


class NotSupportedError(UsageError):
    """The method is in the contract, but this server does not implement it."""


class AccessError(Error):
    """The credentials are missing, unknown, or lack a scope."""


class DeadlineError(Error, TimeoutError):
    """The deadline passed before a response arrived. The request may still complete."""


class CancelledError(Error):
    """This client or another authorized client cancelled the request."""


class ServerError(Error):
    """The service has a defect, or data was damaged in transit or in storage."""


_CLASSES: dict[grpc.StatusCode, type[Error]] = {
    grpc.StatusCode.UNAVAILABLE: RetryableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QuotaError,
    grpc.StatusCode.INVALID_ARGUMENT: UsageError,
    grpc.StatusCode.OUT_OF_RANGE: UsageError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: ConflictError,
    grpc.StatusCode.ABORTED: ConflictError,
    grpc.StatusCode.FAILED_PRECONDITION: StateError,
    grpc.StatusCode.UNIMPLEMENTED: NotSupportedError,
    grpc.StatusCode.UNAUTHENTICATED: AccessError,
    grpc.StatusCode.PERMISSION_DENIED: AccessError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: CancelledError,
}
_DISPOSITIONS: dict[grpc.StatusCode, Disposition] = {
    grpc.StatusCode.INVALID_ARGUMENT: Disposition.REFUSED,
    grpc.StatusCode.DEADLINE_EXCEEDED: Disposition.INTERRUPTED,
    grpc.StatusCode.NOT_FOUND: Disposition.REFUSED,
    grpc.StatusCode.ALREADY_EXISTS: Disposition.REFUSED,
    grpc.StatusCode.PERMISSION_DENIED: Disposition.REFUSED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Disposition.REFUSED,
    grpc.StatusCode.FAILED_PRECONDITION: Disposition.FAILED,
    grpc.StatusCode.UNIMPLEMENTED: Disposition.REFUSED,
    grpc.StatusCode.UNAVAILABLE: Disposition.INTERRUPTED,
    grpc.StatusCode.UNAUTHENTICATED: Disposition.REFUSED,
}
"""Dispositions by code, for servers that send none. Other codes mean UNKNOWN. See `disposition.proto`."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_LOST_STATUS = 'Internal error from Core'
"""Message of grpc 1.85 if a stream ends while the client is sending, because grpc then loses the server's status.

A server's own errors always have details, so an error with this message and without details is treated as UNAVAILABLE.
The repeated call then returns the status of a refusal. Delete this workaround once grpc preserves the status.
"""


def error_from_status(status: status_pb2.Status, *, request_id: str = '') -> Error:
    """Return the error that `status` describes.

    Args:
        status: Status with optional details `ErrorInfo`, `BadRequest` and `RetryInfo`.
        request_id: Id of the call.
    """
    reason, metadata = '', dict[str, str]()
    violations: tuple[FieldViolation, ...] = ()
    retry_after: timedelta | None = None
    disposition: Disposition | None = None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
            disposition = Disposition.__members__.get(metadata.pop(_DISPOSITION_KEY, ''))
        elif detail.Unpack(bad_request):
            violations = tuple(FieldViolation(item.field, item.description) for item in bad_request.field_violations)
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.ToTimedelta()
    return _build(
        ErrorFacts(
            code=_CODES.get(status.code, grpc.StatusCode.UNKNOWN),
            message=status.message,
            reason=reason,
            metadata=metadata,
            violations=violations,
            request_id=request_id,
            retry_after=retry_after,
            disposition=disposition,
        )
    )


def error_from_rpc(error: grpc.aio.AioRpcError, *, request_id: str = '') -> Error:
    """Return the client's error for a failed call.

    Args:
        error: Error that grpc raised.
        request_id: Id of the call, used if the server did not report one.
    """
    trailers = {str(key): value for key, value in error.trailing_metadata() or ()}
    request_id = str(trailers.get(_REQUEST_ID_KEY) or request_id)
    details = trailers.get(_STATUS_KEY)
    if isinstance(details, bytes):
        try:
            return error_from_status(status_pb2.Status.FromString(details), request_id=request_id)
        except DecodeError:
            # A proxy wrote the details, so only the plain status below is usable.
            pass
    code, message = error.code(), error.details() or ''
    is_lost = code is grpc.StatusCode.INTERNAL and message == _LOST_STATUS
    # A server that is stopping cancels calls without details. A call that this client cancels raises no such error.
    if is_lost or code is grpc.StatusCode.CANCELLED:
        code = grpc.StatusCode.UNAVAILABLE
    return _build(ErrorFacts(code=code, message=message, request_id=request_id))


def _disposition_by_code(facts: ErrorFacts) -> Disposition:
    if facts.code is grpc.StatusCode.RESOURCE_EXHAUSTED and facts.retry_after is not None:
        return Disposition.RETRYABLE
    return _DISPOSITIONS.get(facts.code, Disposition.UNKNOWN)


def _build(facts: ErrorFacts) -> Error:
    kind = _CLASSES.get(facts.code, ServerError)
    if facts.code is grpc.StatusCode.RESOURCE_EXHAUSTED and facts.retry_after is not None:
        kind = BusyError
    return kind(facts)
