"""Tests that the gateway limits the bytes of gRPC messages per tenant, and releases them after each call."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from fixtures.gateway_upstream import Upstream
from fixtures.running_gateway import Failure, RunningGateway, bearer, failure_of, running_gateway
from twinkle.api.data.v1 import input_feature_pb2
from twinkle.api.model.v1 import adapter_service_pb2, training_service_pb2
from twinkle_services.kit.config import LimitsConfig

MIB = 1 << 20
LIMITS = LimitsConfig(
    message_bytes=2 * MIB, bytes_per_tenant=4 * MIB, bytes_in_all=32 * MIB, bytes_wait=timedelta(milliseconds=50)
)
PAD = b'\xfa\xff\x01\x80\x80\x40' + bytes(MIB)
"""An unknown field of one MiB."""


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    """All services behind the gateway."""
    async with Upstream().serving() as serving:
        yield serving


@pytest.fixture
async def gateway(upstream: Upstream, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway that allows three concurrent messages of one MiB per tenant."""
    async with running_gateway(tmp_path, upstream=upstream.address, limits=LIMITS) as running:
        yield running


def get_adapter(gateway: RunningGateway, secret: str, adapter_id: str, pad: bytes = PAD) -> Any:
    """Start a call for an adapter with padding in its request."""
    channel: Any = gateway.channel
    method = channel.unary_unary('/twinkle.api.model.v1.AdapterService/GetAdapter')
    request = adapter_service_pb2.GetAdapterRequest(adapter_id=adapter_id).SerializeToString()
    return method(request + pad, metadata=bearer(secret))


async def wait_for_failure(call: Any) -> Failure | None:
    """Return the failure of a call, or None if the call still runs after five seconds."""
    done, _ = await asyncio.wait([asyncio.ensure_future(failure_of(call))], timeout=5)
    return done.pop().result() if done else None


async def test_messages_beyond_the_byte_limit_of_a_tenant_are_refused(
    gateway: RunningGateway, upstream: Upstream
) -> None:
    """Running calls count toward the byte limit until they end; small requests and other tenants are unaffected."""
    alice, bob = [(await gateway.make_key(name)).secret for name in ('alice', 'bob')]
    calls = [get_adapter(gateway, alice, 'slow') for _ in range(6)]
    refusals = [found for found in await asyncio.gather(*map(wait_for_failure, calls)) if found is not None]
    assert len(refusals) == 3
    for failure in refusals:
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 'QUEUE_FULL')
        assert failure.retry_seconds
    for secret, pad in ((bob, PAD), (alice, b'')):
        assert await get_adapter(gateway, secret, 'good', pad)
    for call in calls:
        call.cancel()
    await upstream.adapters.was_cancelled.wait()
    while (
        failure := await wait_for_failure(get_adapter(gateway, alice, 'missing'))
    ) is None or failure.reason == 'QUEUE_FULL':
        pass
    assert failure.reason == 'ADAPTER_NOT_FOUND'


async def test_message_with_too_many_elements_is_refused(gateway: RunningGateway) -> None:
    """A message with too many submessages is refused before parsing, which would block the service."""
    alice = (await gateway.make_key('alice')).secret
    channel: Any = gateway.channel
    request = training_service_pb2.ExecuteRequest()
    features = [input_feature_pb2.InputFeature()] * 900_000
    request.operation.forward_backward.batch.features.features.extend(features)
    method = channel.unary_unary('/twinkle.api.model.v1.TrainingService/Execute')
    failure = await failure_of(method(request.SerializeToString(), metadata=bearer(alice)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, 'INVALID_FIELD')
    assert failure.metadata['field'] == 'request'


async def test_stream_holds_one_message_at_a_time(gateway: RunningGateway) -> None:
    """A long stream stays within the limit, because each message is forwarded before the next one is read."""
    alice = (await gateway.make_key('alice')).secret

    async def messages() -> AsyncIterator[bytes]:
        for number in range(1, 13):
            message = training_service_pb2.TrainRequest()
            message.operation.adapter_id, message.operation.sequence_number = 'ad-1', number
            yield message.SerializeToString() + PAD

    channel: Any = gateway.channel
    method = channel.stream_stream('/twinkle.api.model.v1.TrainingService/Train')
    responses = [response async for response in method(messages(), metadata=bearer(alice))]
    assert len(responses) == 12
