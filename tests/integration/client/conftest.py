"""A fake gateway on loopback and its client."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from fixtures.fake_gateway import API_KEY, FakeGateway
from twinkle_client import TwinkleClient


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    """A fake gateway in the event loop of the test."""
    fake = FakeGateway()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def client(gateway: FakeGateway) -> AsyncIterator[TwinkleClient]:
    """A client that retries for at most five seconds."""
    client = TwinkleClient(f'http://127.0.0.1:{gateway.port}', API_KEY, retry_timeout=timedelta(seconds=5))
    yield client
    # `close` blocks until the session has ended, and the gateway runs in this event loop.
    await asyncio.to_thread(client.close)
