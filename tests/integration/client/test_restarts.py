"""Operations survive restarts of the service: they are sent again, and each is applied once."""

import asyncio
from datetime import timedelta

import grpc
import pytest

from fixtures.fake_gateway import API_KEY, FakeGateway
from fixtures.fake_samplers import until
from fixtures.fake_wire import failure
from twinkle_client import RetryableError, TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel

FEATURE = {'input_ids': [1, 2, 3], 'labels': [-100, 3, 4]}


@pytest.fixture
async def model(client: TwinkleClient) -> MultiLoraTransformersModel:
    """A model with one adapter."""
    model = MultiLoraTransformersModel('tiny', client=client)
    await model.add_adapter_to_model.aio('default')
    return model


async def restart(gateway: FakeGateway) -> None:
    """Close all connections and serve again on the same port."""
    await gateway.stop()
    await gateway.start()


async def test_call_survives_a_restart_of_the_service(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """A call that a restart interrupts completes afterwards and is applied once."""
    gateway.memory.gate.clear()
    step = asyncio.create_task(model.step.aio())
    await gateway.memory.is_called.wait()
    await gateway.stop()
    gateway.memory.gate.set()
    await gateway.start()
    assert (await step)['is_applied']
    assert gateway.applied == ['step']


async def test_pipeline_survives_restarts_of_the_service(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """Unanswered operations of a pipeline are sent again, and each is applied once."""
    async with model.pipeline():
        steps = []
        for index in range(24):
            steps += [model.forward_backward.submit([FEATURE]), model.clip_grad_and_step.submit()]
            if index % 8 == 4:
                await asyncio.wrap_future(steps[-1])
                await restart(gateway)
        outputs = await asyncio.gather(*map(asyncio.wrap_future, steps))
    assert gateway.applied == ['forward_backward', 'clip_grad_and_step'] * 24
    assert sorted(gateway.operations) == list(range(1, 49))
    assert outputs[-1]['step_count'] == 24


async def test_operation_after_a_broken_stream_is_not_lost(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """An idle pipeline opens a new stream after a restart, and its next operation is applied once."""
    async with model.pipeline():
        for count in range(1, 4):
            await model.step.aio()
            await restart(gateway)
            await until(lambda count=count: len(gateway.calls['Train']) > count)
            await asyncio.wait_for(model.forward_backward.aio([FEATURE]), 20)
    assert gateway.applied == ['step', 'forward_backward'] * 3


async def test_operation_that_was_not_journaled_is_sent_again(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """An operation that could not be made durable is sent again with the same sequence number."""
    refusal = failure(grpc.StatusCode.UNAVAILABLE, 'JOURNAL_UNAVAILABLE', retry_seconds=0.01)
    gateway.fail('Execute', refusal, refusal)
    await model.step.aio()
    assert list(gateway.operations) == [1]
    assert len(gateway.calls['Execute']) == 3


async def test_error_is_raised_when_the_retry_timeout_ends(gateway: FakeGateway) -> None:
    """Calls and pipelines raise RetryableError if the service stays unreachable."""
    client = TwinkleClient(f'http://127.0.0.1:{gateway.port}', API_KEY, retry_timeout=timedelta())
    try:
        model = MultiLoraTransformersModel('tiny', client=client)
        await model.add_adapter_to_model.aio('default')
        await gateway.stop()
        with pytest.raises(RetryableError):
            await model.step.aio()
        async with model.pipeline():
            with pytest.raises(RetryableError):
                await model.step.aio()
        await gateway.start()
    finally:
        await asyncio.to_thread(client.close)


async def test_pipeline_continues_after_the_retry_timeout(gateway: FakeGateway) -> None:
    """A pipeline whose operation failed sends the next operation on a new stream."""
    client = TwinkleClient(f'http://127.0.0.1:{gateway.port}', API_KEY, retry_timeout=timedelta())
    try:
        model = MultiLoraTransformersModel('tiny', client=client)
        await model.add_adapter_to_model.aio('default')
        gateway.fail('Train', failure(grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE'))
        async with model.pipeline():
            with pytest.raises(RetryableError):
                await model.step.aio()
            await model.step.aio()
        assert gateway.applied == ['step']
    finally:
        await asyncio.to_thread(client.close)
