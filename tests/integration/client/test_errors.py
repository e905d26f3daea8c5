"""Tests of tracebacks, signatures and errors of the client's methods."""

import asyncio
import inspect
import traceback

import grpc
import pytest

from fixtures.fake_gateway import FakeGateway
from fixtures.fake_wire import failure
from twinkle_client import TwinkleClient
from twinkle_client.dataset import Dataset
from twinkle_client.errors import UsageError
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

REFUSED = failure(grpc.StatusCode.INVALID_ARGUMENT, 'INVALID_FIELD', field='name')


async def test_traceback_of_a_refused_call_shows_the_program(gateway: FakeGateway, client: TwinkleClient) -> None:
    """The traceback of a call ends with the client's only frame; `.aio` raises the same error."""
    gateway.fail('GetServerInfo', REFUSED, REFUSED)
    with pytest.raises(UsageError) as refusal:
        await asyncio.to_thread(client.get_server_info)
    files = [frame.filename for frame in traceback.extract_tb(refusal.tb)]
    assert files[-1].endswith('remote_methods.py')
    assert sum('twinkle_client' in name for name in files) == 1
    with pytest.raises(UsageError, match='INVALID_FIELD'):
        await client.get_server_info.aio()


@pytest.mark.parametrize('method', [MultiLoraTransformersModel.forward_backward, Sampler.sample, Sampler.sample_stream])
def test_methods_of_a_class_have_signatures(method: object) -> None:
    """A remote method of a class has a signature, which documentation tools and `help` show."""
    assert next(iter(inspect.signature(method).parameters)) == 'self'  # type: ignore[arg-type]


async def test_methods_can_be_called_on_the_class(client: TwinkleClient) -> None:
    """A remote method of a class takes the instance as its first argument, like any method."""
    assert await asyncio.to_thread(TwinkleClient.health_check, client)


async def test_name_of_a_missing_file_is_no_hub_dataset(client: TwinkleClient) -> None:
    """An id with the suffix of a data file is a local path; a missing file raises FileNotFoundError."""
    with pytest.raises(FileNotFoundError, match=r"there is no file 'rows.csv' in /"):
        await Dataset('rows.csv', client=client).map.aio('Processor')
