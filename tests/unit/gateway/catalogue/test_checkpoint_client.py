"""Errors of the client of the checkpoint service."""

from collections.abc import AsyncIterator

import pytest

from twinkle_services.gateway.catalogue.grpc import GrpcCheckpoints
from twinkle_services.gateway.catalogue.rules import UploadRequest
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import ServiceUnreachable
from twinkle_services.kit.rpc.context import acting_for


async def _admit(tenant_id: str) -> None:
    """Accept a tenant's upload."""
    assert tenant_id == 'alice'


async def _archive() -> AsyncIterator[bytes]:
    """Yield the parts of an archive."""
    yield b'x'


async def test_an_error_of_an_upload_is_not_its_own_cause() -> None:
    """An error that an upload does not convert is raised unchanged: a cycle of causes would stop some programs."""
    client = GrpcCheckpoints(None, internal_token='', check_storage=_admit)
    request = UploadRequest(upload_id='up-1', name='mine', base_model='org/tiny', size_bytes=1)
    with acting_for(Caller(tenant_id='alice')), pytest.raises(ServiceUnreachable) as failed:
        await client.upload(request, _archive(), offset=0)
    assert failed.value.__cause__ is None
