"""The sampler handle: results in the order of the prompts, and streams that can be cancelled."""

import asyncio

import grpc
import pytest

from fixtures.fake_gateway import FakeGateway
from fixtures.fake_wire import RUN_ID, failure
from twinkle.data_format import StopReason
from twinkle_client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler, vLLMSampler

CHAT = {'messages': [{'role': 'user', 'content': 'who are you?'}], 'user_data': [('target', '7')]}


async def test_num_samples_overrides_the_parameters(gateway: FakeGateway, client: TwinkleClient) -> None:
    """The argument `num_samples` replaces the value in the sampling parameters."""
    results = await vLLMSampler('tiny', client=client).sample.aio(
        [CHAT, 'plain'], {'max_tokens': 4, 'num_samples': 2}, num_samples=4
    )
    assert gateway.calls['SampleBatch'][0].params.sample_count == 4
    assert [len(response.sequences) for response in results] == [4, 4]


async def test_results_are_in_the_order_of_the_prompts(client: TwinkleClient) -> None:
    """Results have the order of their prompts, regardless of the order of completion."""
    results = await Sampler('tiny', client=client).sample.aio(['a', [5, 6], {'input_ids': [7]}])
    assert [response.sequences[0].decoded for response in results] == ['answer 0', 'answer 1', 'answer 2']


async def test_interrupted_batch_is_completed_by_another_call(gateway: FakeGateway, client: TwinkleClient) -> None:
    """Only the unanswered prompts of an interrupted batch are sent again."""
    gateway.fail('AfterPrompt', failure(grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE', retry_seconds=0.01))
    results = await Sampler('tiny', client=client).sample.aio(['a', 'b', 'c'])
    assert [len(request.prompts) for request in gateway.calls['SampleBatch']] == [3, 2]
    assert len(results) == 3


async def test_results_support_get_and_training_features(client: TwinkleClient) -> None:
    """`get` works on results and sequences; the labels of the new feature cover only the completion."""
    results = await Sampler('tiny', client=client).sample.aio(CHAT)
    sequence = results.get('sequences', [])[0]
    feature = sequence.get('new_input_feature', sequence)
    assert list(feature['input_ids']) == [1, 2, 3, 50, 60]
    assert list(feature['labels']) == [-100, -100, 50, 60, -100]
    assert feature['messages'][-1] == {'role': 'assistant', 'content': 'answer 0'}
    assert feature['user_data'] == CHAT['user_data']
    assert sequence.get('logprobs') == [[(50, -1.0)], [(60, -2.0)]]
    assert sequence.version_spans[0].version == 3
    assert sequence.stop_reason is StopReason.STOP


async def test_weights_are_sent_as_a_reference(gateway: FakeGateway, client: TwinkleClient) -> None:
    """A name, a version or a path becomes the matching reference in the request."""
    model = MultiLoraTransformersModel('tiny', client=client)
    await model.add_adapter_to_model.aio('mine')
    sampler = Sampler('tiny', client=client)
    await sampler.sample.aio('a', None, 'mine', version=3)
    await sampler.sample.aio('a', adapter_name='mine', min_version=2)
    await sampler.sample.aio('a', adapter_uri='twinkle://ad-1/weights/x')
    await sampler.sample.aio('a')
    exact, at_least, path, base = [request.adapter for request in gateway.calls['SampleBatch']]
    assert (exact.adapter_id, exact.exact) == (RUN_ID, 3)
    assert at_least.at_least == 2
    assert path.checkpoint_path == 'twinkle://ad-1/weights/x'
    assert not base.adapter_id
    with pytest.raises(ValueError, match='version'):
        await sampler.sample.aio('a', version=3)


async def test_stream_yields_deltas_and_the_stop_reason(client: TwinkleClient) -> None:
    """The texts of the deltas form the answer, and the last delta contains the stop reason."""
    deltas = [delta async for delta in Sampler('tiny', client=client).sample_stream.aio('a')]
    assert ''.join(delta.text for delta in deltas) == 'one two '
    assert deltas[-1].stop_reason is StopReason.LENGTH


async def test_leaving_a_blocking_stream_cancels_it(gateway: FakeGateway, client: TwinkleClient) -> None:
    """Leaving the loop over an endless stream cancels the call on the server."""

    def first_word() -> str:
        for delta in Sampler('tiny', client=client).sample_stream('a', {'max_tokens': 0}):
            return delta.text
        return ''

    assert await asyncio.to_thread(first_word) == 'one '
    async with asyncio.timeout(10):
        while not gateway.calls['SampleCancelled']:
            await client.get_server_info.aio()
