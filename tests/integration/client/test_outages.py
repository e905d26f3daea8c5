"""Warnings of the client while a service is unavailable."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from fixtures.fake_gateway import FakeGateway
from fixtures.fake_samplers import until
from fixtures.fake_wire import failure
from twinkle_client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

UNREACHABLE = failure(grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE', service='model')
CONTINUES = 'the response continues when it is back'
NOT_READY = failure(grpc.StatusCode.UNAVAILABLE, 'VERSION_NOT_READY')


class Warnings(logging.Handler):
    """Collects the client's warnings, and the number of calls before each warning."""

    def __init__(self, gateway: FakeGateway) -> None:
        super().__init__(logging.WARNING)
        self._gateway = gateway
        self._loop = asyncio.get_running_loop()
        self.first = asyncio.Event()
        self.messages: list[str] = []
        self.attempts: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store a warning."""
        self.messages.append(record.getMessage())
        self.attempts.append(len(self._gateway.calls['GetServerInfo']))
        self._loop.call_soon_threadsafe(self.first.set)


@pytest.fixture
async def warnings(gateway: FakeGateway) -> AsyncIterator[Warnings]:
    """The client's warnings."""
    handler = Warnings(gateway)
    logger = logging.getLogger('twinkle_client')
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


async def test_unavailable_service_is_reported_after_a_second(
    gateway: FakeGateway, client: TwinkleClient, warnings: Warnings
) -> None:
    """The warning is logged before the attempt at 1.4 seconds; it names the service and the remaining time."""
    gateway.fail('GetServerInfo', *[UNREACHABLE] * 3)
    await client.get_server_info.aio()
    (message,) = warnings.messages
    assert message.startswith('the model service is unavailable; retrying for up to ')
    # Attempts are made after 0, 0.2, 0.6 and 1.4 seconds.
    assert warnings.attempts[0] <= 3


async def test_outage_is_reported_once_for_all_calls(
    gateway: FakeGateway, client: TwinkleClient, warnings: Warnings
) -> None:
    """Calls that wait for the same service share one warning; a later outage causes a new warning."""
    for count in (1, 2):
        gateway.fail('GetServerInfo', *[UNREACHABLE] * 15)
        await asyncio.gather(*(client.get_server_info.aio() for _ in range(5)))
        assert len(warnings.messages) == count


async def test_stopped_gateway_is_reported(gateway: FakeGateway, client: TwinkleClient, warnings: Warnings) -> None:
    """A stopped gateway causes a warning while a call and a pipeline wait; both continue after its restart."""
    model = MultiLoraTransformersModel('tiny', client=client)
    await model.add_adapter_to_model.aio('default')
    async with model.pipeline():
        await model.step.aio()
        await gateway.stop()
        calls = asyncio.gather(client.get_server_info.aio(), model.step.aio())
        await warnings.first.wait()
        await gateway.start()
        await calls
    (message,) = warnings.messages
    assert message.startswith(f'the gateway at 127.0.0.1:{gateway.port} is unavailable; retrying for up to ')


async def test_expected_refusals_are_not_reported(
    gateway: FakeGateway, client: TwinkleClient, warnings: Warnings
) -> None:
    """A version that is not ready yet causes no warning, because the services are available."""
    gateway.fail('GetServerInfo', *[NOT_READY] * 3)
    await client.get_server_info.aio()
    assert warnings.messages == []


async def test_unavailable_service_behind_a_running_response_is_reported(
    gateway: FakeGateway, client: TwinkleClient, warnings: Warnings
) -> None:
    """Silent streams share one warning; a later outage of the service causes a new warning."""
    sampler = Sampler('tiny', client=client)
    streams = [asyncio.create_task(read_all(sampler)) for _ in range(3)]
    for count in (1, 2):
        warnings.first.clear()
        gateway.unreachable = {'sampler'}
        await warnings.first.wait()
        gateway.unreachable = {'model'}
        for _ in range(2):
            await question(gateway)
        assert warnings.messages == [f'the sampler service is unavailable; {CONTINUES}'] * count
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)


async def test_slow_response_is_not_reported(gateway: FakeGateway, client: TwinkleClient, warnings: Warnings) -> None:
    """If a stream is silent while all services respond, the client queries the services but logs no warning."""
    stream = asyncio.create_task(read_all(Sampler('tiny', client=client)))
    await question(gateway)
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    assert warnings.messages == []


async def read_all(sampler: Sampler) -> None:
    """Read a stream that the fake gateway never ends."""
    async for _ in sampler.sample_stream.aio('x', {'max_tokens': 8}):
        pass


async def question(gateway: FakeGateway) -> None:
    """Wait until the client queries which services respond."""
    count = len(gateway.calls['GetServerInfo'])
    await until(lambda: len(gateway.calls['GetServerInfo']) > count)
