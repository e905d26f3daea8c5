"""Verbs outside a basic training loop: undo, layer health, estimates, custom losses, watches and cancellation."""

import asyncio
import logging

import grpc
import numpy as np
import pytest

from fixtures.fake_gateway import FakeGateway
from fixtures.fake_wire import failure
from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel

FEATURE = {'input_ids': [1, 2, 3], 'labels': [-100, 3, 4]}
INTERRUPTED = failure(grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE', retry_seconds=0.01)


@pytest.fixture
async def model(client: TwinkleClient) -> MultiLoraTransformersModel:
    """A model with one adapter."""
    model = MultiLoraTransformersModel('tiny', client=client)
    await model.add_adapter_to_model.aio('default', LoraConfig(r=4))
    return model


async def test_checkpoint_is_saved_with_its_labels(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """A checkpoint's labels are sent unchanged; an unknown argument raises TypeError and consumes no number."""
    with pytest.raises(TypeError, match='owner'):
        await model.save.aio('a', owner='me')  # type: ignore[call-arg]
    await model.save.aio('a', user_metadata={'team': 'a'}, overwrite=True)
    saved = gateway.operations[1].save
    assert (dict(saved.user_metadata), saved.is_overwrite_allowed) == ({'team': 'a'}, True)


async def test_undo_and_export_are_operations(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """`undo` and `export_merged` are numbered like every other operation and return their results."""
    assert (await model.undo.aio(2))['is_applied']
    assert await model.export_merged.aio('merged') == '/exports/merged'
    assert gateway.operations[1].undo.step_count == 2
    assert gateway.operations[2].export_merged.name == 'merged'


async def test_checkpoint_contains_the_data_cursor(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """The count of consumed samples is saved even if it is 0; a load with the optimizer returns the counters."""
    await model.save.aio('a', save_optimizer=True, consumed_train_samples=0)
    await model.save.aio('b', save_optimizer=True)
    counters = await model.resume_from_checkpoint.aio('twinkle://run/weights/a')
    assert counters == {'cur_step': 3, 'gradient_accumulation_steps': 2, 'consumed_train_samples': 24}
    assert await model.resume_from_checkpoint.aio('twinkle://run/weights/a', resume_only_model=True) == {}
    saved = [gateway.operations[number].save for number in (1, 2)]
    assert [verb.HasField('consumed_train_samples') for verb in saved] == [True, False]
    assert [gateway.operations[number].load.is_optimizer_included for number in (3, 4)] == [True, False]


async def test_evaluation_metrics_are_configured_separately(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """A metric is added to the training metrics or to the evaluation metrics."""
    await model.add_metric.aio('Accuracy', is_training=False)
    await model.add_metric.aio('Accuracy')
    sent = [gateway.operations[number].configure.training_config for number in (1, 2)]
    assert [(len(config.metrics), len(config.evaluation_metrics)) for config in sent] == [(0, 1), (1, 0)]


async def test_gradient_limit_and_health_are_sent(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """The gradient limit and the request for layer health are sent, and a plain step does not request health."""
    output = await model.clip_grad_and_step.aio(max_grad_value=0.5, return_health=True)
    await model.step.aio()
    sent = gateway.operations[1].clip_grad_and_step
    assert (sent.max_grad_value, sent.is_health_returned) == (0.5, True)
    assert [(layer['path'], layer['relative_update']) for layer in output['layers']] == [('layer', 0.25)]
    assert not gateway.operations[2].step.is_health_returned


async def test_loss_and_optimizer_options_apply_to_one_operation(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """A batch's loss, and a step's learning rate and optimizer options, are sent in this operation only."""
    feature = {'input_ids': [1, 2, 3], 'labels': [2, 3, -100]}
    await model.forward_backward.aio([feature], loss='ppo', loss_options={'clip_low_threshold': 0.9})
    await model.forward_only.aio([feature])
    await model.clip_grad_and_step.aio(learning_rate=0.5, optimizer_options={'betas': (0.9, 0.95)})
    await model.step.aio(optimizer_options={'weight_decay': 0})
    sent = gateway.operations
    assert (sent[1].forward_backward.loss.name, dict(sent[1].forward_backward.loss.options)) == (
        'ppo',
        {'clip_low_threshold': 0.9},
    )
    assert not sent[2].forward_only.HasField('loss')
    assert sent[3].clip_grad_and_step.learning_rate == 0.5
    assert list(sent[3].clip_grad_and_step.optimizer_options['betas']) == [0.9, 0.95]
    assert not sent[4].step.HasField('learning_rate')
    assert dict(sent[4].step.optimizer_options) == {'weight_decay': 0.0}
    with pytest.raises(TypeError):
        await model.forward_only.aio([feature], loss_options={'beta': 1})


async def test_full_parameters_send_no_lora_configuration(
    gateway: FakeGateway, client: TwinkleClient, caplog: pytest.LogCaptureFixture
) -> None:
    """A request for full-parameter training has no LoRA configuration, and the service's warnings are logged."""
    model = MultiLoraTransformersModel('tiny', client=client)
    with caplog.at_level(logging.WARNING, logger='twinkle_client'):
        await model.add_adapter_to_model.aio('all', full_parameters=True)
    request = gateway.calls['CreateAdapter'][0]
    assert request.HasField('full_parameters')
    assert not request.HasField('lora_config')
    assert 'only a fake' in caplog.text
    with pytest.raises(ValueError, match='config_or_dir'):
        await model.add_adapter_to_model.aio('both', LoraConfig(), full_parameters=True)


async def test_repr_shows_the_adapters(client: TwinkleClient) -> None:
    """The text of a model handle shows its base model and the ids of its adapters."""
    handle = MultiLoraTransformersModel('tiny', client=client)
    assert repr(handle) == "MultiLoraTransformersModel('tiny', adapters={})"
    await handle.add_adapter_to_model.aio('one', LoraConfig(r=4))
    assert repr(handle) == f"MultiLoraTransformersModel('tiny', adapters={{'one': {handle.adapter_id('one')!r}}})"


async def test_estimate_creates_no_adapter(gateway: FakeGateway, client: TwinkleClient) -> None:
    """The estimate contains numbers and durations, and no adapter is created."""
    model = MultiLoraTransformersModel('tiny', client=client)
    cost = await model.estimate.aio(LoraConfig(r=4), batch_size=8, sequence_tokens=200, optimizer='SGD')
    assert (cost['does_fit'], cost['peak_bytes'], cost['step_time'].total_seconds()) == (False, 1600, 1.5)
    assert cost['is_measured_under_load']
    request = gateway.calls['Estimate'][0]
    assert (request.lora_config.lora_rank, request.optimizer.name) == (4, 'SGD')
    assert gateway.calls['CreateAdapter'] == []


async def test_custom_loss_in_numpy_runs_in_the_client(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """The gradients of a custom loss are sent unchanged, or as 0 where the label is -100."""
    seen = []

    def loss_fn(features, logps):
        seen.append((features[0]['user_data'], [array.tolist() for array in logps]))
        return -1.5, [np.ones(3), [1.0, 2.0, 3.0]], {'seen': 2}

    inputs = [{**FEATURE, 'user_data': [('answer', '42')]}, FEATURE]
    output = await model.forward_backward_custom.aio(inputs, loss_fn, framework='numpy')
    assert seen == [([('answer', '42')], [[-0.5] * 3] * 2)]
    assert (output['loss'], output['metrics'], output['num_tokens']) == (-1.5, {'seen': 2.0}, 2)
    sent = gateway.operations[2].backward.logprob_gradients
    assert [np.frombuffer(tensor.data, '<f4').tolist() for tensor in sent] == [[0, 1, 1], [0, 2, 3]]
    assert gateway.applied == ['forward', 'backward']


async def test_custom_loss_in_torch_is_differentiated(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """A custom loss may return a scalar tensor; the client sends its gradient with respect to the log-probabilities."""
    output = await model.forward_backward_custom.aio(FEATURE, lambda _, logps: -(logps[0] * 2).sum())
    assert output['loss'] == pytest.approx(3.0)
    (sent,) = gateway.operations[2].backward.logprob_gradients
    assert np.frombuffer(sent.data, '<f4').tolist() == [0, -2, -2]


@pytest.mark.parametrize(
    'returned',
    [
        1.0,
        (1.0, []),
        (float('nan'), [np.ones(3)]),
        (1.0, [np.ones(2)]),
        (1.0, [np.full(3, np.inf)]),
        (1.0, [np.ones((3, 1))]),
    ],
)
async def test_invalid_gradient_of_a_custom_loss_is_refused(
    gateway: FakeGateway, model: MultiLoraTransformersModel, returned: object
) -> None:
    """The client refuses an invalid loss or gradient, and the adapter remains usable."""
    with pytest.raises(ValueError, match=r'loss|gradients'):
        await model.forward_backward_custom.aio(FEATURE, lambda *_: returned, framework='numpy')
    await model.zero_grad.aio()
    assert gateway.applied == ['forward', 'zero_grad']


async def test_custom_loss_is_not_interleaved_with_other_operations(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """A step that is submitted while a custom loss is being computed is applied after the loss's gradient."""
    step = []

    def loss_fn(features, logps):
        del features
        step.append(model.step.submit())
        return 0.0, [np.zeros(3) for _ in logps]

    await model.forward_backward_custom.aio(FEATURE, loss_fn, framework='numpy')
    await asyncio.wrap_future(step[0])
    assert gateway.applied == ['forward', 'backward', 'step']


async def test_interrupted_watch_is_resumed(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """An interrupted watch reports every operation once and in order."""
    for _ in range(4):
        await model.zero_grad.aio()
    gateway.fail('AfterWatched', INTERRUPTED, INTERRUPTED)
    numbers = [result.sequence_number async for result in model.watch_operations.aio(after=1)]
    assert numbers == [2, 3, 4]
    assert [call.after_sequence_number for call in gateway.calls['WatchOperations']] == [1, 2, 3]


async def test_cancel_returns_whether_it_succeeded(model: MultiLoraTransformersModel) -> None:
    """Cancelling returns False for an applied operation, and True for an operation that was not applied."""
    await model.zero_grad.aio()
    assert not await model.cancel_operation.aio(1)
    assert await model.cancel_operation.aio(2)


async def test_cancelled_call_does_not_block_later_calls(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """An empty `configure` operation takes a cancelled operation's number, so that later operations are not blocked."""
    gateway.fail('Execute', failure(grpc.StatusCode.CANCELLED, 'CANCELLED'))
    outcomes = await asyncio.gather(model.zero_grad.aio(), model.step.aio(), return_exceptions=True)
    assert outcomes[0].code is grpc.StatusCode.CANCELLED
    assert {number: operation.WhichOneof('verb') for number, operation in gateway.operations.items()} == {
        1: 'configure',
        2: 'step',
    }
