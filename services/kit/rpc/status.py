"""Domain errors as `google.rpc.Status`, and back."""

from collections.abc import Mapping
from datetime import timedelta
from typing import cast

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.kit.errors import (
    Cancelled,
    Code,
    DeadlinePassed,
    DomainError,
    FieldViolation,
    QuotaExceeded,
    ServiceUnreachable,
)
from twinkle.errors import error_class

DOMAIN = 'twinkle'
"""`ErrorInfo.domain` of every error."""

_MESSAGE_BYTES = 600
_FACT_BYTES = 300
"""A status travels in trailing metadata, of which gRPC takes 8 KiB; with longer ones the call would be lost."""


@error_class()
class ForwardedError(DomainError):
    """An error of another service, passed on as it came."""

    code: Code  # type: ignore[misc]
    reason: str  # type: ignore[misc]
    message: str
    facts: Mapping[str, str]
    fields: tuple[FieldViolation, ...] = ()
    delay: timedelta | None = None

    def __str__(self) -> str:
        return self.message

    def metadata(self) -> Mapping[str, str]:
        """Return the metadata that came with it."""
        return self.facts

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """The fields that came with it."""
        return self.fields

    @property
    def retry_after(self) -> timedelta | None:
        """The delay that came with it."""
        return self.delay


def status_from_error(error: DomainError) -> status_pb2.Status:
    """Return the status of `error`: `ErrorInfo` always, then at most one each of the other details.

    Texts that callers can make as long as they like are cut to what a status may hold.
    """
    status = status_pb2.Status(code=int(error.code), message=_cut(str(error), _MESSAGE_BYTES))
    metadata = {key: _cut(value, _FACT_BYTES) for key, value in error.metadata().items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    status.details.add().Pack(info)
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad_request.field_violations.add(
                field=_cut(violation.field, _FACT_BYTES), description=_cut(violation.problem, _MESSAGE_BYTES)
            )
        status.details.add().Pack(bad_request)
    if isinstance(error, QuotaExceeded):
        failure = error_details_pb2.QuotaFailure()
        failure.violations.add(subject=error.quota, description=status.message)
        status.details.add().Pack(failure)
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(error.retry_after)
        status.details.add().Pack(retry)
    return status


def _cut(text: str, limit_bytes: int) -> str:
    data = text.encode()
    return text if len(data) <= limit_bytes else data[: limit_bytes - 3].decode(errors='ignore') + '...'


def error_from_status(status: status_pb2.Status) -> DomainError:
    """Return the error that `status` tells of; one without `ErrorInfo` has the reason 'INTERNAL'."""
    reason, facts = 'INTERNAL', dict[str, str]()
    fields: tuple[FieldViolation, ...] = ()
    delay: timedelta | None = None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason, facts = info.reason, dict(info.metadata)
        elif detail.Unpack(bad_request):
            fields = tuple(FieldViolation(item.field, item.description) for item in bad_request.field_violations)
        elif detail.Unpack(retry):
            delay = retry.retry_delay.ToTimedelta()
    return ForwardedError(Code(status.code), reason, status.message, facts, fields, delay)


def error_from_call(error: grpc.aio.AioRpcError, *, service: str) -> DomainError:
    """Return the domain error behind a failed call to another service.

    Args:
        error: what the call raised.
        service: name of the service that was called, for errors that came from the transport.
    """
    status = cast(status_pb2.Status | None, rpc_status.from_call(cast(grpc.Call, error)))
    if status is not None:
        return error_from_status(status)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlinePassed()
    if error.code() is grpc.StatusCode.CANCELLED:
        return Cancelled()
    return ServiceUnreachable(service)
