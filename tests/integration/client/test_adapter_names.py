"""Each model handle has its own adapter names."""

import asyncio

import grpc
import pytest

from fixtures.fake_gateway import FakeGateway
from fixtures.fake_wire import failure
from twinkle_client import TwinkleClient, UsageError
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler


async def test_two_handles_share_a_name(gateway: FakeGateway, client: TwinkleClient) -> None:
    """Each handle trains its own adapter; a sampler refuses the ambiguous name until one adapter is removed."""
    first, second = (MultiLoraTransformersModel('tiny', client=client) for _ in range(2))
    ids = list[str]()
    for model in (first, second):
        ids.append(await model.add_adapter_to_model.aio('default'))
        await model.step.aio(adapter_name='default')
    assert [request.operation.adapter_id for request in gateway.calls['Execute']] == ids
    sampler = Sampler('tiny', client=client)
    with pytest.raises(ValueError, match=r'model\.adapter_id'):
        await sampler.sample.aio('a', None, 'default')
    await sampler.sample.aio('a', None, second.adapter_id('default'))
    await second.remove_adapter.aio('default')
    await sampler.sample.aio('a', None, 'default')
    assert [request.adapter.adapter_id for request in gateway.calls['SampleBatch']] == ids[::-1]


async def test_name_is_unique_within_a_handle(gateway: FakeGateway, client: TwinkleClient) -> None:
    """A name is reserved while its adapter is being created; a refused creation releases the name."""
    model = MultiLoraTransformersModel('tiny', client=client)
    gateway.fail('CreateAdapter', failure(grpc.StatusCode.INVALID_ARGUMENT, 'INVALID_FIELD'))
    with pytest.raises(UsageError):
        await model.add_adapter_to_model.aio('default')
    results = await asyncio.gather(
        *(model.add_adapter_to_model.aio('default') for _ in range(2)), return_exceptions=True
    )
    assert [type(item) for item in results] == [str, ValueError]
    with pytest.raises(ValueError, match='default'):
        await model.attach_adapter.aio('default', 'ad-7')
    assert (len(gateway.calls['CreateAdapter']), gateway.calls['GetAdapter']) == (2, [])


async def test_adapter_needs_a_name(gateway: FakeGateway, client: TwinkleClient) -> None:
    """An empty name is refused, because a sampler interprets an empty name as the base model."""
    with pytest.raises(ValueError, match='adapter_name'):
        await MultiLoraTransformersModel('tiny', client=client).add_adapter_to_model.aio('')
    assert gateway.calls['CreateAdapter'] == []
