"""Every error reason of the contract becomes the client exception that fits its status code."""

import re
from datetime import timedelta

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from fixtures.source_tree import ROOT
from twinkle_client import errors

CONTRACT = ROOT / 'protos' / 'twinkle' / 'api' / 'error' / 'v1' / 'error_reason.proto'
COMMENTS: dict[str, str] = {
    reason: ' '.join(re.findall(r'// ?(.*)', comment))
    for comment, reason in re.findall(
        r'((?:^ *//.*\n)+) *ERROR_REASON_(\w+) = [1-9]', CONTRACT.read_text(), re.MULTILINE
    )
}
"""Comment of each error reason; its first sentence begins with the status code."""
CLASSES: dict[str, type[errors.Error]] = {
    'INVALID_ARGUMENT': errors.UsageError,
    'NOT_FOUND': errors.NotFoundError,
    'ALREADY_EXISTS': errors.ConflictError,
    'ABORTED': errors.ConflictError,
    'FAILED_PRECONDITION': errors.StateError,
    'RESOURCE_EXHAUSTED': errors.QuotaError,
    'RESOURCE_EXHAUSTED with RetryInfo': errors.BusyError,
    'UNAVAILABLE with RetryInfo': errors.RetryableError,
    'UNAUTHENTICATED': errors.AccessError,
    'PERMISSION_DENIED': errors.AccessError,
    'DATA_LOSS': errors.ServerError,
    'DEADLINE_EXCEEDED': errors.DeadlineError,
    'CANCELLED': errors.CancelledError,
    'UNIMPLEMENTED': errors.NotSupportedError,
    'INTERNAL': errors.ServerError,
}
"""Client exception of each status code."""


@pytest.mark.parametrize('reason', COMMENTS)
def test_reason_has_its_class(reason: str) -> None:
    """The status code of a reason, and whether the error has a retry time, determine the class of the exception."""
    code_name = COMMENTS[reason].split('.')[0].split(' ')[0]
    has_retry = 'RetryInfo' in COMMENTS[reason].split('.')[0]
    status = _status(grpc.StatusCode[code_name], reason, has_retry=has_retry)
    error = errors.error_from_status(status, request_id='rq-1')
    assert type(error) is CLASSES[f'{code_name} with RetryInfo' if has_retry else code_name]
    assert error.reason == reason
    assert error.code is grpc.StatusCode[code_name]
    assert error.metadata == {'key': 'value'}
    assert error.retry_after == (timedelta(milliseconds=1500) if has_retry else None)
    assert error.request_id == 'rq-1'


def test_every_code_of_the_contract_is_mapped() -> None:
    """The keys of `CLASSES` are exactly the codes that the comments of the contract name."""
    codes = {comment.split('.')[0].split(' ')[0] for comment in COMMENTS.values()}
    assert codes == {name.split(' ')[0] for name in CLASSES}


def test_field_violations_are_in_the_attributes_and_the_message() -> None:
    """Each refused field appears in the exception's attributes and in its message."""
    status = _status(grpc.StatusCode.INVALID_ARGUMENT, 'INVALID_FIELD', has_retry=False)
    bad_request = error_details_pb2.BadRequest()
    bad_request.field_violations.add(field='batch.features[0]', description='is empty')
    status.details.add().Pack(bad_request)
    error = errors.error_from_status(status)
    assert error.violations == (errors.FieldViolation('batch.features[0]', 'is empty'),)
    assert 'batch.features[0]' in str(error)


def test_failure_of_the_transport_is_retryable() -> None:
    """The status code alone determines the exception if the error details are missing or damaged."""
    for details in ((), (('grpc-status-details-bin', b'\xff\xff'),)):
        metadata = grpc.aio.Metadata(*details)
        error = errors.error_from_rpc(
            grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, None, metadata, details='gone'), request_id='rq-2'
        )
        assert isinstance(error, errors.RetryableError)
        assert (error.reason, error.request_id) == ('', 'rq-2')


def test_deadline_is_a_timeout() -> None:
    """A deadline error is also a TimeoutError."""
    status = _status(grpc.StatusCode.DEADLINE_EXCEEDED, 'DEADLINE_PASSED', has_retry=False)
    assert isinstance(errors.error_from_status(status), TimeoutError)


def _status(code: grpc.StatusCode, reason: str, *, has_retry: bool) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message='it failed')
    info = error_details_pb2.ErrorInfo(reason=reason, domain='twinkle', metadata={'key': 'value'})
    status.details.add().Pack(info)
    if has_retry:
        delay = duration_pb2.Duration(seconds=1, nanos=500_000_000)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


@pytest.mark.parametrize(
    ('message', 'kind'),
    [('Internal error from Core', errors.RetryableError), ('anything else', errors.ServerError)],
)
def test_status_that_grpc_lost_is_retryable(message: str, kind: type[errors.Error]) -> None:
    """An internal error of grpc itself is retryable; an internal error of the server is not."""
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), details=message)
    assert type(errors.error_from_rpc(error)) is kind
