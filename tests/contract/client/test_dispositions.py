"""The client and the services derive the disposition of a failed request as the contract specifies."""

import re
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from twinkle.api.error.v1 import disposition_pb2
from twinkle_client import errors as client
from twinkle_services.kit.errors import Code, Disposition, DomainError, disposition_by_code
from twinkle_services.kit.rpc.status import DISPOSITION_KEY, error_from_status, status_from_error

CONTRACT = Path(__file__).parents[3] / 'protos/twinkle/api/error/v1/disposition.proto'
CODES = sorted(Code)


def _error(code: Code) -> DomainError:
    return type(code.name, (DomainError,), {'code': code, 'reason': code.name})()


def _bare_status(code: Code, *, has_retry_time: bool) -> status_pb2.Status:
    """Return the status of a server that sends no disposition."""
    status = status_pb2.Status(code=int(code), message='failed')
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason='REASON', domain='twinkle'))
    if has_retry_time:
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1)))
    return status


def test_services_and_client_have_the_dispositions_of_the_contract() -> None:
    """The services and the client have exactly the dispositions that the contract defines."""
    names = {name.removeprefix('DISPOSITION_') for name in disposition_pb2.Disposition.DESCRIPTOR.values_by_name} - {
        'UNSPECIFIED'
    }
    assert set(Disposition.__members__) == set(client.Disposition.__members__) == names


@pytest.mark.parametrize('disposition', Disposition)
@pytest.mark.parametrize('code', CODES)
def test_client_and_services_read_the_sent_disposition(code: Code, disposition: Disposition) -> None:
    """A sent disposition takes precedence over the status code, and is not part of the metadata."""
    error = _error(code)
    error.disposition = disposition
    status = status_from_error(error)
    for received in (error_from_status(status), client.error_from_status(status)):
        assert received.disposition == disposition
        metadata = received.metadata if isinstance(received, client.Error) else received.metadata()
        assert DISPOSITION_KEY not in metadata


@pytest.mark.parametrize('has_retry_time', [False, True])
@pytest.mark.parametrize('code', CODES)
def test_client_and_services_fall_back_to_the_code(code: Code, has_retry_time: bool) -> None:  # noqa: FBT001
    """Client and services derive the same disposition from the status code if none was sent."""
    status = _bare_status(code, has_retry_time=has_retry_time)
    expected = disposition_by_code(code, has_retry_time=has_retry_time)
    assert error_from_status(status).disposition is expected
    assert client.error_from_status(status).disposition == expected


def test_unknown_dispositions_fall_back_to_the_code() -> None:
    """An unknown disposition is ignored, and the status code determines the disposition."""
    status = status_pb2.Status(code=int(Code.NOT_FOUND), message='failed')
    info = error_details_pb2.ErrorInfo(reason='REASON', domain='twinkle', metadata={DISPOSITION_KEY: 'LATER'})
    status.details.add().Pack(info)
    assert error_from_status(status).disposition is Disposition.REFUSED
    assert client.error_from_status(status).disposition is client.Disposition.REFUSED


def test_failures_of_the_transport_are_ambiguous() -> None:
    """A broken connection gives the disposition INTERRUPTED, because the request may have taken effect."""
    lost = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details='reset')
    assert client.error_from_rpc(lost).disposition is client.Disposition.INTERRUPTED


def test_contract_lists_the_codes_of_each_disposition() -> None:
    """The comment in the contract lists the status codes that the implementation uses."""
    comment = ' '.join(re.findall(r'^// ?(.*)', CONTRACT.read_text(), re.MULTILINE))
    refused = {code for code in CODES if disposition_by_code(code, has_retry_time=False) is Disposition.REFUSED}
    listed = re.search(r'REFUSED for (.*?); RETRYABLE', comment)
    assert listed is not None
    assert set(re.findall(r'[A-Z_]{5,}', listed.group(1))) == {code.name for code in refused}
    assert 'FAILED for FAILED_PRECONDITION; INTERRUPTED for UNAVAILABLE and DEADLINE_EXCEEDED' in comment
