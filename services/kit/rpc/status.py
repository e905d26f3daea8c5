"""Conversion of domain errors to `google.rpc.Status` and back."""

from collections.abc import Mapping
from datetime import timedelta
from typing import cast

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from twinkle.errors import error_class
from twinkle_services.kit.errors import (
    Code,
    DeadlinePassed,
    Disposition,
    DomainError,
    FieldViolation,
    QuotaExceeded,
    ServiceUnreachable,
)

DOMAIN = 'twinkle'
"""`ErrorInfo.domain` of every error."""

DISPOSITION_KEY = 'disposition'
"""Key of the disposition in `ErrorInfo.metadata`; see `twinkle.api.error.v1.Disposition`."""
_MESSAGE_BYTES = 600
_FACT_BYTES = 300
"""Limits on strings in a status, which is sent as trailing metadata. gRPC limits the metadata of a call to 8 KiB."""


@error_class()
class ForwardedError(DomainError):
    """An error that another service returned, with the metadata that the service sent."""

    code: Code  # type: ignore[misc]
    reason: str  # type: ignore[misc]
    message: str
    facts: Mapping[str, str]
    fields: tuple[FieldViolation, ...] = ()
    delay: timedelta | None = None

    def __str__(self) -> str:
        return self.message

    def metadata(self) -> Mapping[str, str]:
        """Return the received metadata, without the disposition."""
        return self.facts

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """The received field violations."""
        return self.fields

    @property
    def retry_after(self) -> timedelta | None:
        """The received retry delay."""
        return self.delay


def status_from_error(error: DomainError) -> status_pb2.Status:
    """Return the status of `error`. Its details are an `ErrorInfo`, followed by the other details that apply.

    Long strings are truncated, because callers control the length of some of them.
    """
    status = status_pb2.Status(code=int(error.code), message=_truncated(str(error), _MESSAGE_BYTES))
    metadata = {key: _truncated(value, _FACT_BYTES) for key, value in error.metadata().items()}
    metadata[DISPOSITION_KEY] = error.disposition.value
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    status.details.add().Pack(info)
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad_request.field_violations.add(
                field=_truncated(violation.field, _FACT_BYTES),
                description=_truncated(violation.problem, _MESSAGE_BYTES),
            )
        status.details.add().Pack(bad_request)
    if error.reason == QuotaExceeded.reason:
        failure = error_details_pb2.QuotaFailure()
        failure.violations.add(subject=metadata.get('quota', ''), description=status.message)
        status.details.add().Pack(failure)
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(error.retry_after)
        status.details.add().Pack(retry)
    return status


def _truncated(text: str, limit_bytes: int) -> str:
    data = text.encode()
    return text if len(data) <= limit_bytes else data[: limit_bytes - 3].decode(errors='ignore') + '...'


def error_from_status(status: status_pb2.Status) -> DomainError:
    """Return the error that `status` describes; without `ErrorInfo` its reason is 'INTERNAL'."""
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
    error = ForwardedError(Code(status.code), reason, status.message, facts, fields, delay)
    disposition = Disposition.__members__.get(facts.pop(DISPOSITION_KEY, ''))
    if disposition is not None:
        error.disposition = disposition
    return error


def error_from_call(error: grpc.aio.AioRpcError, *, service: str) -> DomainError:
    """Return the domain error behind a failed call to another service.

    Args:
        error: Error that the call raised.
        service: Name of the called service, for errors of the transport.
    """
    status = cast(status_pb2.Status | None, rpc_status.from_call(cast(grpc.Call, error)))
    if status is not None:
        return error_from_status(status)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlinePassed()
    # A service that is stopping cancels calls without details. A call that this process cancels raises CancelledError.
    return ServiceUnreachable(service)
