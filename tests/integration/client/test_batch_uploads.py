"""Batches above the message limit go ahead of their operation, and arrive whole."""

import asyncio

import grpc
import numpy as np
import pytest

from fixtures.fake_gateway import FakeGateway
from fixtures.fake_wire import failure
from twinkle_client import QuotaError, TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.transfer import CHUNK_BYTES

LENGTH = 400_000
FEATURE = {'input_ids': np.arange(LENGTH) % 7, 'labels': np.arange(LENGTH) % 7}
CUT = failure(grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE', retry_seconds=0.01)


@pytest.fixture
async def model(gateway: FakeGateway, client: TwinkleClient) -> MultiLoraTransformersModel:
    """A model with one adapter, behind a gateway that takes messages of 2 MiB."""
    gateway.message_bytes = 2 << 20
    model = MultiLoraTransformersModel('tiny', client=client)
    await model.add_adapter_to_model.aio('default')
    return model


def arrived(gateway: FakeGateway, number: int = 1) -> np.ndarray:
    """Return the tokens of the first example of an operation."""
    (feature,) = gateway.operations[number].forward_backward.batch.features.features
    return np.frombuffer(feature.input_ids.data, '<i4')


async def test_large_batch_is_uploaded(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """The operation names the upload; options stay with it."""
    await model.forward_backward.aio([FEATURE], temperature=0.5)
    np.testing.assert_array_equal(arrived(gateway), FEATURE['input_ids'])
    assert gateway.operations[1].forward_backward.options.temperature == 0.5
    assert len(gateway.memory.batches) == 1


async def test_small_batch_goes_inside(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """Nothing is asked or uploaded for what surely fits."""
    await model.forward_backward.aio([{'input_ids': [1, 2], 'labels': [2, 3]}])
    assert gateway.calls['UploadBatch'] == gateway.calls['GetServerInfo'] == []


async def test_cut_upload_is_gone_on_with(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """What came before a cut is not sent again, and an answer that says busy is waited for."""
    gateway.fail('AfterBatchChunk', CUT, CUT)
    gateway.fail('UploadBatch', failure(grpc.StatusCode.FAILED_PRECONDITION, 'IN_USE'))
    await model.forward_backward.aio([FEATURE])
    np.testing.assert_array_equal(arrived(gateway), FEATURE['input_ids'])


async def test_same_batch_again_is_there_already(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """An upload is named after its content; the second time only that is asked."""
    await model.forward_backward.aio([FEATURE])
    before = len(gateway.calls['UploadBatch'])
    await model.forward_backward.aio([FEATURE])
    assert (before, len(gateway.calls['UploadBatch'])) == (2, 3)


@pytest.mark.parametrize('is_pipelined', [False, True])
async def test_expired_upload_is_sent_again(
    gateway: FakeGateway, model: MultiLoraTransformersModel, *, is_pipelined: bool
) -> None:
    """An operation whose batch is gone keeps its number."""
    gone = failure(grpc.StatusCode.NOT_FOUND, 'UPLOAD_NOT_FOUND')
    gateway.fail('Answer' if is_pipelined else 'Execute', gone)
    if is_pipelined:
        async with model.pipeline():
            await model.forward_backward.aio([FEATURE])
    else:
        await model.forward_backward.aio([FEATURE])
    np.testing.assert_array_equal(arrived(gateway), FEATURE['input_ids'])
    assert list(gateway.operations) == [1]


async def test_order_holds_where_some_are_uploaded(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """A pipeline sends nothing ahead of a batch that is still going up."""
    async with model.pipeline():
        await asyncio.gather(model.forward_backward.aio([FEATURE]), model.step.aio(), model.zero_grad.aio())
    assert gateway.applied == ['forward_backward', 'step', 'zero_grad']


@pytest.mark.parametrize('is_pipelined', [False, True])
async def test_upload_that_is_refused_fails_its_operation_alone(
    gateway: FakeGateway, model: MultiLoraTransformersModel, *, is_pipelined: bool
) -> None:
    """The program is told the reason, and the number is free."""
    full = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, 'QUOTA_EXCEEDED')
    gateway.fail('UploadBatch', full)
    if is_pipelined:
        async with model.pipeline():
            with pytest.raises(QuotaError):
                await model.forward_backward.aio([FEATURE])
            await model.zero_grad.aio()
    else:
        with pytest.raises(QuotaError):
            await model.forward_backward.aio([FEATURE])
        await model.zero_grad.aio()
    assert list(gateway.operations) == [1]
    assert LENGTH * 8 > CHUNK_BYTES
