"""The model handle: every operation is numbered and applied once, and numbers of refused operations are used again."""

import asyncio

import grpc
import numpy as np
import pytest

from fixtures.fake_gateway import FakeGateway
from fixtures.fake_wire import RUN_ID, failure
from twinkle.api.model.v1 import operation_pb2, training_config_pb2
from twinkle.data_format import LoraConfig
from twinkle_client import ServerError, StateError, TwinkleClient, UsageError
from twinkle_client.dataloader import BatchHandle
from twinkle_client.model import MultiLoraTransformersModel

FEATURE = {'input_ids': [1, 2, 3], 'labels': [-100, 3, 4]}
UNREACHABLE = failure(grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE', retry_seconds=0.01)
BAD_FIELD = failure(grpc.StatusCode.INVALID_ARGUMENT, 'INVALID_FIELD')


@pytest.fixture
async def model(client: TwinkleClient) -> MultiLoraTransformersModel:
    """A model with one adapter."""
    model = MultiLoraTransformersModel('tiny', client=client)
    await model.add_adapter_to_model.aio('default', LoraConfig(r=4))
    return model


async def test_adapter_is_created_with_its_configuration(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """The request that creates an adapter contains the LoRA settings, mean reduction and the base model."""
    request = gateway.calls['CreateAdapter'][0]
    assert request.base_model == 'tiny'
    assert request.lora_config.lora_rank == 4
    assert list(request.lora_config.target_modules) == ['all-linear']
    assert request.training_config.loss.reduction == training_config_pb2.LOSS_REDUCTION_MEAN
    assert model.adapter_id() == RUN_ID


async def test_verbs_of_a_training_loop_arrive_in_order(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """Each verb becomes one operation, and operations arrive in the order of the calls."""
    await model.set_loss.aio('CrossEntropyLoss')
    await model.set_optimizer.aio('AdamW', lr=1e-4, weight_decay=0.1)
    await model.set_lr_scheduler.aio('CosineWarmupScheduler', num_warmup_steps=5, num_training_steps=10)
    output = await model.forward_backward.aio([FEATURE])
    assert await model.clip_grad_norm.aio(1.0) == 0.25
    await model.step.aio()
    await model.zero_grad.aio()
    await model.lr_step.aio()
    assert await model.calculate_metric.aio() == {'loss': 0.5}
    assert await model.publish_version.aio() == 7
    assert await model.save.aio('final') == f'twinkle://{RUN_ID}/weights/final'
    assert output['loss'] == 1.5
    assert [logps.tolist() for logps in output['logps']] == [[-0.5] * 3]
    assert gateway.applied[3:8] == ['forward_backward', 'clip_grad_norm', 'step', 'zero_grad', 'lr_step']
    assert sorted(gateway.operations) == list(range(1, 12))
    optimizer = gateway.operations[2].configure.training_config.optimizer
    assert (optimizer.name, optimizer.learning_rate, optimizer.options['weight_decay']) == ('AdamW', 1e-4, 0.1)


async def test_operation_with_a_lost_response_is_applied_once(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """An operation whose response is lost is sent again and gets the recorded result."""
    gateway.fail('AfterExecute', *[UNREACHABLE] * 4)
    await model.step.aio()
    assert gateway.applied == ['step']
    assert len(gateway.calls['Execute']) == 5


async def test_number_of_a_refused_operation_is_reused(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """The operation after an INVALID_ARGUMENT error uses the same sequence number."""
    gateway.fail('Execute', BAD_FIELD)
    with pytest.raises(UsageError):
        await model.forward_backward.aio([FEATURE])
    await model.step.aio()
    assert list(gateway.operations) == [1]


@pytest.mark.parametrize('was_applied', [True, False])
async def test_ambiguous_failure_is_resolved_before_the_next_operation(
    gateway: FakeGateway, model: MultiLoraTransformersModel, *, was_applied: bool
) -> None:
    """The operation after an ambiguous failure gets a new number only if the failed operation was applied."""
    gateway.fail('AfterExecute' if was_applied else 'Execute', failure(grpc.StatusCode.INTERNAL, 'INTERNAL'))
    with pytest.raises(ServerError):
        await model.step.aio()
    await model.step.aio()
    assert sorted(gateway.operations) == ([1, 2] if was_applied else [1])


@pytest.mark.parametrize(('disposition', 'numbers'), [('FAILED', [1, 2]), ('REFUSED', [1])])
async def test_disposition_makes_the_query_unnecessary(
    gateway: FakeGateway, model: MultiLoraTransformersModel, disposition: str, numbers: list[int]
) -> None:
    """If an error states whether the sequence number is used, the client does not query the service."""
    lost = failure(grpc.StatusCode.DATA_LOSS, 'DIGEST_MISMATCH', disposition=disposition)
    gateway.fail('AfterExecute' if disposition == 'FAILED' else 'Execute', lost)
    with pytest.raises(ServerError):
        await model.step.aio()
    await model.step.aio()
    assert sorted(gateway.operations) == numbers
    assert gateway.calls['GetOperation'] == []


async def test_number_used_by_another_program_is_refused_once(
    gateway: FakeGateway, client: TwinkleClient, model: MultiLoraTransformersModel
) -> None:
    """An operation is refused once if another handle has used its number; the next operation gets an unused number."""
    other = MultiLoraTransformersModel('tiny', client=client)
    await other.attach_adapter.aio('same', RUN_ID)
    await other.zero_grad.aio()
    with pytest.raises(UsageError):
        await model.step.aio()
    await model.step.aio()
    assert gateway.applied == ['zero_grad', 'step']


async def test_pipeline_sends_operations_in_order_without_waiting(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """Operations of a pipeline are sent on one stream in the order of the calls."""
    async with model.pipeline():
        results = await asyncio.gather(
            model.forward_backward.aio([FEATURE]), model.clip_grad_and_step.aio(), model.zero_grad.aio()
        )
    assert results[1]['step_count'] == 1
    assert gateway.applied == ['forward_backward', 'clip_grad_and_step', 'zero_grad']
    assert len(gateway.calls['Train']) == 1
    assert gateway.calls['Execute'] == []
    await model.step.aio()
    assert len(gateway.calls['Execute']) == 1


async def test_broken_pipeline_applies_each_operation_once(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """Unanswered operations of an interrupted stream are sent again and get their recorded results."""
    gateway.fail('Operation', UNREACHABLE)
    async with model.pipeline():
        await asyncio.gather(model.forward_backward.aio([FEATURE]), model.clip_grad_and_step.aio())
    assert gateway.applied == ['forward_backward', 'clip_grad_and_step']
    assert len(gateway.calls['Train']) == 2


async def test_refusal_in_a_pipeline_fails_the_operations_after_it(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """No operation after a refused operation is applied, and the next operation uses the refused operation's number."""
    gateway.fail('Operation', BAD_FIELD)
    async with model.pipeline():
        outcomes = await asyncio.gather(
            model.forward_backward.aio([FEATURE]), model.step.aio(), model.zero_grad.aio(), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [UsageError, StateError, StateError]
        await asyncio.gather(model.forward_backward.aio([FEATURE]), model.step.aio())
    assert gateway.applied == ['forward_backward', 'step']
    assert sorted(gateway.operations) == [1, 2]


async def test_refusal_of_a_call_does_not_fail_concurrent_calls(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """An empty `configure` operation takes the refused call's number, so that the concurrent call succeeds."""
    gateway.fail('Execute', BAD_FIELD)
    outcomes = await asyncio.gather(model.forward_backward.aio([FEATURE]), model.step.aio(), return_exceptions=True)
    assert isinstance(outcomes[0], UsageError)
    assert gateway.operations[1].WhichOneof('verb') == 'configure'
    assert gateway.operations[2].WhichOneof('verb') == 'step'


async def test_unjournaled_operation_of_a_pipeline_is_sent_again(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """If an operation of a pipeline gets a retryable error, it is sent again on the same stream."""
    gateway.fail('Answer', failure(grpc.StatusCode.UNAVAILABLE, 'JOURNAL_UNAVAILABLE', retry_seconds=0.01))
    async with model.pipeline():
        await model.forward_backward.aio([FEATURE])
    assert gateway.applied == ['forward_backward']
    assert len(gateway.calls['Train']) == 1


async def test_policy_inputs_are_aligned_with_the_labels(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """One number applies to all labels; a list has a number per label, or is a sampler's log-probabilities."""
    await model.forward_backward.aio(
        inputs=[FEATURE, FEATURE],
        advantages=[0.5, -1.0],
        old_logps=[[-1.0, -2.0], [[(3, -3.0)], [(4, -4.0)]]],
    )
    features = gateway.operations[1].forward_backward.batch.features.features
    rows = [np.frombuffer(feature.old_logps.data, '<f4').tolist() for feature in features]
    assert rows == [[0.0, -1.0, -2.0], [0.0, -3.0, -4.0]]
    assert np.frombuffer(features[1].advantages.data, '<f4').tolist() == [0.0, -1.0, -1.0]


async def test_trajectories_are_sent_as_messages(gateway: FakeGateway, model: MultiLoraTransformersModel) -> None:
    """A trajectory is sent with its messages and without tokens."""
    await model.forward_backward.aio({'messages': [{'role': 'user', 'content': 'hi'}]})
    trajectories = gateway.operations[1].forward_backward.batch.trajectories.trajectories
    assert trajectories[0].messages[0].parts[0].text == 'hi'


async def test_unknown_adapter_name_is_refused_by_the_client(model: MultiLoraTransformersModel) -> None:
    """An unknown name raises a KeyError that lists the known names."""
    with pytest.raises(KeyError, match='default'):
        await model.step.aio(adapter_name='other')


async def test_batch_handle_is_sent_instead_of_features(
    gateway: FakeGateway, model: MultiLoraTransformersModel
) -> None:
    """A handle is sent as the loader's id and a cursor; per-example arguments and custom losses are refused."""
    handle = BatchHandle(loader_id='ld-1', consumed_rows=4, cursor_state=b's')
    await model.forward_backward.aio(handle, temperature=0.5)
    batch = gateway.memory.operations[1].forward_backward.batch
    assert batch.loader == operation_pb2.LoaderBatch(loader_id='ld-1', cursor={'consumed_rows': 4, 'state': b's'})
    with pytest.raises(ValueError, match='advantages'):
        await model.forward_backward.aio(handle, advantages=[1.0])
    with pytest.raises(ValueError, match='custom'):
        await model.forward_backward_custom.aio(handle, lambda features, logps: None)
    with pytest.raises(TypeError):
        len(handle)
    assert list(gateway.memory.operations) == [1]
