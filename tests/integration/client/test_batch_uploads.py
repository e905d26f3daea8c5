"""Batches above the message limit are uploaded before their operation."""

import asyncio

import grpc
import numpy as np
import pytest

from fixtures.fake_gateway import FakeGateway
from fixtures.fake_wire import failure
from twinkle.api.model.v1.operation_pb2 import ForwardBackward
from twinkle_client import QuotaError, TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.transfer import CHUNK_BYTES

LENGTH = 400_000
FEATURE = {'input_ids': np.arange(LENGTH) % 7, 'labels': np.arange(LENGTH) % 7}
INTERRUPTED = failure(grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE', retry_seconds=0.01)


@pytest.fixture
async def model(gateway: FakeGateway, client: TwinkleClient) -> MultiLoraTransformersModel:
    """A model with one adapter, behind a gateway that accepts messages of up to 2 MiB."""
    gateway.message_bytes = 2 << 20
    model = MultiLoraTransformersModel('tiny', client=client)
    await model.add_adapter_to_model.aio('default')
    return model


def received_tokens(gateway: FakeGateway, number: int = 1) -> np.ndarray:
    """Return the tokens of the only example of an operation."""
    (feature,) = gateway.operations[number].forward_backward.batch.features.features
    return np.frombuffer(feature.input_ids.data, '<i4')


async def test_large_batch_is_uploaded(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """A batch above the message limit is uploaded; its operation has the options and the id of the upload."""
    await model.forward_backward.aio([FEATURE], temperature=0.5)
    np.testing.assert_array_equal(received_tokens(gateway), FEATURE['input_ids'])
    assert gateway.operations[1].forward_backward.options.temperature == 0.5
    assert len(gateway.memory.batches) == 1


async def test_uploaded_and_small_batches_have_the_same_operation(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """Except for the batch, the operation of an uploaded batch equals that of a batch inside the message."""
    verbs: list[ForwardBackward] = []
    for number, length in enumerate((2, LENGTH), start=1):
        feature = {name: column[:length] for name, column in FEATURE.items()}
        await model.forward_backward.aio([feature], loss='CrossEntropyLoss', temperature=0.5)
        verb = ForwardBackward()
        verb.CopyFrom(gateway.operations[number].forward_backward)
        verb.ClearField('batch')
        verbs.append(verb)
    assert verbs[0].HasField('loss')
    assert verbs[1] == verbs[0]


async def test_small_batch_is_sent_in_the_operation(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """A batch below the message limit needs no upload and no query of the server's limits."""
    await model.forward_backward.aio([{'input_ids': [1, 2], 'labels': [2, 3]}])
    assert gateway.calls['UploadBatch'] == gateway.calls['GetServerInfo'] == []


async def test_interrupted_upload_is_resumed(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """An upload that is interrupted or in use is retried until the service has received the whole batch."""
    gateway.fail('AfterBatchChunk', INTERRUPTED, INTERRUPTED)
    gateway.fail('UploadBatch', failure(grpc.StatusCode.FAILED_PRECONDITION, 'IN_USE'))
    await model.forward_backward.aio([FEATURE])
    np.testing.assert_array_equal(received_tokens(gateway), FEATURE['input_ids'])


async def test_repeated_batch_is_not_uploaded_again(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """An upload's id depends on its content, so a repeated batch needs only one call of UploadBatch."""
    await model.forward_backward.aio([FEATURE])
    before = len(gateway.calls['UploadBatch'])
    await model.forward_backward.aio([FEATURE])
    assert (before, len(gateway.calls['UploadBatch'])) == (2, 3)


@pytest.mark.parametrize('is_pipelined', [False, True])
async def test_expired_upload_is_sent_again(
    gateway: FakeGateway, model: MultiLoraTransformersModel, *, is_pipelined: bool
) -> None:
    """An operation whose upload has expired is sent again with the same sequence number."""
    expired = failure(grpc.StatusCode.NOT_FOUND, 'UPLOAD_NOT_FOUND')
    gateway.fail('Answer' if is_pipelined else 'Execute', expired)
    if is_pipelined:
        async with model.pipeline():
            await model.forward_backward.aio([FEATURE])
    else:
        await model.forward_backward.aio([FEATURE])
    np.testing.assert_array_equal(received_tokens(gateway), FEATURE['input_ids'])
    assert list(gateway.operations) == [1]


async def test_operations_wait_for_the_upload_of_an_earlier_batch(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """The operations of a pipeline are applied in order even if the first operation's batch must be uploaded."""
    async with model.pipeline():
        await asyncio.gather(model.forward_backward.aio([FEATURE]), model.step.aio(), model.zero_grad.aio())
    assert gateway.applied == ['forward_backward', 'step', 'zero_grad']


@pytest.mark.parametrize('is_pipelined', [False, True])
async def test_refused_upload_fails_only_its_operation(
    gateway: FakeGateway, model: MultiLoraTransformersModel, *, is_pipelined: bool
) -> None:
    """A refused upload raises an error for its operation, and the next operation uses the same sequence number."""
    quota_exceeded = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, 'QUOTA_EXCEEDED')
    gateway.fail('UploadBatch', quota_exceeded)
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
