"""Warnings of the client while a service is unavailable."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from fixtures.fake_gateway import FakeGateway
from fixtures.fake_wire import failure
from twinkle_client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel

UNREACHABLE = failure(grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE', service='model')
NOT_READY = failure(grpc.StatusCode.UNAVAILABLE, 'VERSION_NOT_READY')


class Warnings(logging.Handler):
    """Collects the client's warnings, with the number of attempts before each of them."""

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
    """The warning names the service and the remaining time before the attempt after 1.4 seconds."""
    gateway.fail('GetServerInfo', *[UNREACHABLE] * 3)
    await client.get_server_info.aio()
    (message,) = warnings.messages
    assert message.startswith('the model service is unavailable; retrying for up to ')
    # Attempts are made after 0, 0.2, 0.6 and 1.4 seconds.
    assert warnings.attempts[0] <= 3


async def test_outage_is_reported_once_for_all_calls(
    gateway: FakeGateway, client: TwinkleClient, warnings: Warnings
) -> None:
    """Calls that wait for the same service share one warning; the next outage is reported again."""
    for count in (1, 2):
        gateway.fail('GetServerInfo', *[UNREACHABLE] * 15)
        await asyncio.gather(*(client.get_server_info.aio() for _ in range(5)))
        assert len(warnings.messages) == count


async def test_stopped_gateway_is_reported(gateway: FakeGateway, client: TwinkleClient, warnings: Warnings) -> None:
    """A gateway that cannot be reached is reported while calls and pipelines wait, and both continue after it."""
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
    """A version that is not ready yet leads to no warning, because the services are available."""
    gateway.fail('GetServerInfo', *[NOT_READY] * 3)
    await client.get_server_info.aio()
    assert warnings.messages == []
