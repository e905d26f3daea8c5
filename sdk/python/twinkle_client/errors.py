"""What a call raises when it fails: a small tree, one class for each thing a program may do about it.

Error:
 ├─ RetryableError > BusyError    try again, after `retry_after` if it is set; the client already has
 ├─ UsageError > NotFoundError, ConflictError, StateError, QuotaError, NotSupportedError
 ├─ AccessError                   the API key is missing, unknown, or may not do this
 ├─ DeadlineError                 no answer in time; also a TimeoutError
 ├─ CancelledError                somebody with the right to cancelled it
 └─ ServerError                   a defect of the service, or data that was damaged on its way
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

__all__ = [
    'AccessError',
    'BusyError',
    'CancelledError',
    'ConflictError',
    'DeadlineError',
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

_STATUS_KEY = 'grpc-status-details-bin'
_REQUEST_ID_KEY = 'x-request-id'


@dataclass(frozen=True)
class FieldViolation:
    """A field of the request that was refused."""

    field: str
    """Its path, such as `operation.forward_backward.batch.features[2].labels`."""
    problem: str


@dataclass(frozen=True, kw_only=True)
class ErrorFacts:
    """What is known of a failed call."""

    code: grpc.StatusCode
    message: str
    reason: str = ''
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    violations: tuple[FieldViolation, ...] = ()
    request_id: str = ''
    retry_after: timedelta | None = None


class Error(Exception):
    """A call failed. `str()` is a sentence for people; the attributes are for programs."""

    def __init__(self, facts: ErrorFacts) -> None:
        """Carry `facts`."""
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
        """GRPC's status code."""
        return self._facts.code

    @property
    def reason(self) -> str:
        """Name of an `ErrorReason` without its prefix; empty where the transport failed."""
        return self._facts.reason

    @property
    def metadata(self) -> Mapping[str, str]:
        """Facts that come with the reason, such as `adapterId`."""
        return self._facts.metadata

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """The fields that were refused."""
        return self._facts.violations

    @property
    def request_id(self) -> str:
        """The call's id, to be quoted in a report."""
        return self._facts.request_id

    @property
    def retry_after(self) -> timedelta | None:
        """When it makes sense to try again."""
        return self._facts.retry_after


class RetryableError(Error):
    """The service cannot do it now; the same request may succeed later."""


class BusyError(RetryableError):
    """A queue is full."""


class UsageError(Error):
    """The request cannot succeed as it is."""


class NotFoundError(UsageError):
    """There is no such thing for this caller."""


class ConflictError(UsageError):
    """The id, name or number is taken, or another writer was first."""


class StateError(UsageError):
    """Something has to happen first: the message says what."""


class QuotaError(UsageError):
    """A quota or size limit is reached."""


class NotSupportedError(UsageError):
    """The verb is in the contract, but this server does not have it."""


class AccessError(Error):
    """The credentials are missing, unknown, or lack a scope."""


class DeadlineError(Error, TimeoutError):
    """The deadline passed first; what had begun may still finish."""


class CancelledError(Error):
    """The call was cancelled by somebody else with the right to."""


class ServerError(Error):
    """The service failed in a way that is no fault of the request."""


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
_CODES = {code.value[0]: code for code in grpc.StatusCode}


_LOST_STATUS = 'Internal error from Core'
"""What grpc 1.85 says where a stream ended while we were still sending and the server's own status was
lost with it. Our servers never end a call without details, so the call may be tried again, which
tells the status if it was a refusal. To be dropped once grpc keeps the status."""


def error_from_status(status: status_pb2.Status, *, request_id: str = '') -> Error:
    """Return the error that `status` tells of.

    Args:
        status: with `ErrorInfo`, `BadRequest` and `RetryInfo` among its details, where they apply.
        request_id: the call's id.
    """
    reason, metadata = '', dict[str, str]()
    violations: tuple[FieldViolation, ...] = ()
    retry_after: timedelta | None = None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
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
        )
    )


def error_from_rpc(error: grpc.aio.AioRpcError, *, request_id: str = '') -> Error:
    """Return the error behind a failed call.

    Args:
        error: what grpc raised.
        request_id: the call's id, where the server did not name it.
    """
    trailers = {str(key): value for key, value in error.trailing_metadata() or ()}
    request_id = str(trailers.get(_REQUEST_ID_KEY) or request_id)
    details = trailers.get(_STATUS_KEY)
    if isinstance(details, bytes):
        try:
            return error_from_status(status_pb2.Status.FromString(details), request_id=request_id)
        except DecodeError:
            # Something between us and the service wrote it: the plain status below is all there is.
            pass
    code, message = error.code(), error.details() or ''
    if code is grpc.StatusCode.INTERNAL and message == _LOST_STATUS:
        code = grpc.StatusCode.UNAVAILABLE
    return _build(ErrorFacts(code=code, message=message, request_id=request_id))


def _build(facts: ErrorFacts) -> Error:
    kind = _CLASSES.get(facts.code, ServerError)
    if facts.code is grpc.StatusCode.RESOURCE_EXHAUSTED and facts.retry_after is not None:
        kind = BusyError
    return kind(facts)
