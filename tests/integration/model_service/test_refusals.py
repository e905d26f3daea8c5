"""Invalid input over the network: status, reason and field of the refusal, and unchanged state."""

import math

import numpy as np
import pytest

from fixtures.checkpoint_service import as_tenant, failure_of
from fixtures.model_service import batch_of, draw_example, forward_backward, operation_of, serving_model
from twinkle.api.data.v1 import message_pb2
from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_config_pb2, training_service_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle_services.kit.rpc.json_values import struct_of
from twinkle_services.kit.rpc.tensors import tensor_to_proto

GOOD = forward_backward([draw_example()])


def broken(field, tensor):
    """Return forward_backward for two examples, with this tensor in the second example."""
    verb = forward_backward([draw_example(), draw_example(12, 1)])
    getattr(verb.batch.features.features[1], field).CopyFrom(tensor)
    return {'forward_backward': verb}


def extra(name, values):
    """Return forward_backward for one example with an extra tensor."""
    verb = forward_backward([draw_example()])
    verb.batch.features.features[0].extra_tensors[name].CopyFrom(tensor_to_proto(values))
    return {'forward_backward': verb}


def example(**fields):
    """Return forward_backward for one example with the given fields replaced."""
    return {'forward_backward': forward_backward([{**draw_example(), **fields}])}


def configured(**fields):
    """Return a change of the configuration."""
    return {'configure': operation_pb2.Configure(training_config=training_config_pb2.TrainingConfig(**fields))}


def loader_batch():
    """Return a batch that refers to a loader."""
    return operation_pb2.Batch(loader=operation_pb2.LoaderBatch(loader_id='x'))


INT = np.int32
MANY_STEPS = training_config_pb2.SchedulerConfig(
    name='MultiStepLR', options=struct_of({'milestones': list(range(1001))})
)
MANY_OPTIONS = struct_of({'name': 'x' * (64 << 10)})
BAD_OPERATIONS = {
    'no verb': ({}, 'INVALID_FIELD', 'operation.verb'),
    'no batch': ({'forward_backward': operation_pb2.ForwardBackward()}, 'INVALID_FIELD', 'batch'),
    'empty batch': ({'forward_backward': operation_pb2.ForwardBackward(batch=batch_of([]))}, 'INVALID_FIELD', 'batch'),
    'wrong dtype': (broken('input_ids', tensor_to_proto(np.ones(12, np.float32))), 'INVALID_FIELD', '[1].input_ids'),
    'no dtype': (broken('labels', tensor_pb2.Tensor(shape=[12], data=b'0' * 48)), 'INVALID_FIELD', '[1].labels'),
    'negative size': (
        broken('labels', tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[-12], data=b'0' * 48)),
        'INVALID_FIELD',
        '[1].labels',
    ),
    'bytes that do not fit': (
        broken('labels', tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[12], data=b'0' * 47)),
        'INVALID_FIELD',
        '[1].labels',
    ),
    'two dimensions': (broken('input_ids', tensor_to_proto(np.ones((3, 4), INT))), 'INVALID_FIELD', '[1].input_ids'),
    'label out of vocabulary': (
        broken('labels', tensor_to_proto(np.full(12, 320, INT))),
        'INVALID_FIELD',
        '[1].labels',
    ),
    'negative token': (broken('input_ids', tensor_to_proto(np.full(12, -1, INT))), 'INVALID_FIELD', '[1].input_ids'),
    'labels of another length': (broken('labels', tensor_to_proto(np.ones(5, INT))), 'INVALID_FIELD', '[1].labels'),
    'weights not finite': (example(loss_weights=np.full(12, math.nan)), 'INVALID_FIELD', '[0].loss_weights'),
    'decreasing positions': (example(position_ids=np.arange(12)[::-1]), 'INVALID_FIELD', 'position_ids'),
    'negative position': (example(position_ids=np.arange(12) - 1), 'INVALID_FIELD', 'position_ids'),
    'no label counts': (example(labels=np.full(12, -100)), 'INVALID_FIELD', 'labels'),
    'too long': ({'forward_backward': forward_backward([draw_example(513)])}, 'INVALID_FIELD', 'input_ids'),
    'a stream that no loss reads': (extra('noise', np.ones(12, np.float32)), 'INVALID_FIELD', "extra_tensors['noise']"),
    'a stream of another length': (extra('returns', np.ones(5, np.float32)), 'INVALID_FIELD', "['returns'].shape"),
    'missing upload': (
        {'forward_only': operation_pb2.ForwardOnly(batch=operation_pb2.Batch(upload_id='x'))},
        'UPLOAD_NOT_FOUND',
        '',
    ),
    'undo of zero steps': ({'undo': operation_pb2.Undo()}, 'INVALID_FIELD', 'undo.step_count'),
    'export outside its folder': ({'export_merged': operation_pb2.ExportMerged(name='../x')}, 'INVALID_FIELD', 'name'),
    'zero temperature': (
        {
            'forward_only': operation_pb2.ForwardOnly(
                batch=GOOD.batch, options=operation_pb2.ForwardOptions(temperature=0.0)
            )
        },
        'INVALID_FIELD',
        'temperature',
    ),
    'negative norm': (
        {'clip_grad_norm': operation_pb2.ClipGradNorm(max_grad_norm=-1.0)},
        'INVALID_FIELD',
        'max_grad_norm',
    ),
    'infinite rate': ({'step': operation_pb2.Step(learning_rate=math.inf)}, 'INVALID_FIELD', 'learning_rate'),
    'unknown optimizer': (
        configured(optimizer=training_config_pb2.OptimizerConfig(name='AdamX')),
        'UNKNOWN_COMPONENT',
        'training_config.optimizer',
    ),
    'unknown schedule': (
        configured(lr_scheduler=training_config_pb2.SchedulerConfig(name='LambdaLR')),
        'UNKNOWN_COMPONENT',
        'training_config.lr_scheduler',
    ),
    'patches': (
        configured(patches=[training_config_pb2.ComponentConfig(name='P')]),
        'INVALID_FIELD',
        'training_config.patches',
    ),
    'no accumulation': (configured(gradient_accumulation_steps=0), 'INVALID_FIELD', 'gradient_accumulation_steps'),
    'a schedule with too many steps': (
        configured(lr_scheduler=MANY_STEPS),
        'INVALID_FIELD',
        'configure.training_config.lr_scheduler.options.milestones',
    ),
    'too many options of a step': (
        {'step': operation_pb2.Step(optimizer_options=MANY_OPTIONS)},
        'INVALID_FIELD',
        'step.optimizer_options',
    ),
    'too many options of a loss': (
        {
            'forward_backward': operation_pb2.ForwardBackward(
                batch=GOOD.batch, loss=training_config_pb2.LossConfig(options=MANY_OPTIONS)
            )
        },
        'INVALID_FIELD',
        'forward_backward.loss.options',
    ),
    'bad checkpoint name': ({'save': operation_pb2.Save(name='../x')}, 'INVALID_FIELD', 'name'),
    'bad checkpoint path': ({'load': operation_pb2.Load(checkpoint_path='x')}, 'INVALID_FIELD', 'checkpoint_path'),
    'absent checkpoint': (
        {'load': operation_pb2.Load(checkpoint_path='twinkle://ad-x/weights/y')},
        'CHECKPOINT_NOT_FOUND',
        '',
    ),
    'batch of a loader': ({'forward_only': operation_pb2.ForwardOnly(batch=loader_batch())}, 'NOT_BUILT_YET', ''),
    'chats': (
        {
            'forward_only': operation_pb2.ForwardOnly(
                batch=operation_pb2.Batch(
                    trajectories=operation_pb2.TrajectoryBatch(trajectories=[message_pb2.Trajectory()])
                )
            )
        },
        'NOT_BUILT_YET',
        '',
    ),
    'hub': ({'upload_to_hub': operation_pb2.UploadToHub()}, 'NOT_BUILT_YET', ''),
}


async def test_bad_operations_are_refused_and_do_not_use_their_number(service):
    """An invalid operation is refused with the expected reason and field; the adapter and its number are unchanged."""
    adapter_id = (await service.create()).adapter_id
    for name, (verb, reason, field) in BAD_OPERATIONS.items():
        failure = await failure_of(service.execute(adapter_id, 1, **verb))
        assert (name, failure.reason) == (name, reason)
        assert field in failure.field, name
        assert 'Traceback' not in failure.message
    result = await service.result(adapter_id, 1, forward_backward=GOOD)
    assert result.forward.label_count == 8
    request = adapter_service_pb2.GetAdapterRequest(adapter_id=adapter_id)
    adapter = (await service.adapters.GetAdapter(request, metadata=as_tenant('alice'))).adapter
    assert (adapter.sequence_number, adapter.training_config.optimizer.name) == (1, 'AdamW')


async def test_a_batch_above_the_limit_is_too_large(tiny_llama_dir, tmp_path):
    """The error for a batch above the token limit has its size and the limit, and its number is not used."""
    async with serving_model(tiny_llama_dir, tmp_path, max_batch_tokens=20) as service:
        adapter_id = (await service.create()).adapter_id
        large = forward_backward([draw_example(12), draw_example(9)])
        failure = await failure_of(service.execute(adapter_id, 1, forward_backward=large))
        assert (failure.code, failure.reason) == ('INVALID_ARGUMENT', 'BATCH_TOO_LARGE')
        assert failure.metadata == {'tokenCount': '21', 'tokenLimit': '20'}
        await service.result(adapter_id, 1, forward_backward=GOOD)


async def test_a_batch_with_too_many_examples_is_refused(tiny_llama_dir, tmp_path):
    """The error for a batch with too many examples names the field, and the operation's number is not used."""
    async with serving_model(tiny_llama_dir, tmp_path, max_batch_examples=2) as service:
        adapter_id = (await service.create()).adapter_id
        many = forward_backward([draw_example()] * 3)
        failure = await failure_of(service.execute(adapter_id, 1, forward_backward=many))
        assert failure.reason == 'INVALID_FIELD'
        assert failure.field == 'operation.forward_backward.batch.features.features'
        await service.result(adapter_id, 1, forward_backward=GOOD)


BAD_ADAPTERS = {
    'another model': ({'base_model': 'gpt'}, 'BASE_MODEL_NOT_FOUND', ''),
    'no request id': ({'request_id': ''}, 'INVALID_FIELD', 'request_id'),
    'negative rank': ({'lora_config': training_config_pb2.LoraConfig(lora_rank=-1)}, 'INVALID_FIELD', 'lora_rank'),
    'rank too high': ({'lora_config': training_config_pb2.LoraConfig(lora_rank=9999)}, 'INVALID_FIELD', 'lora_rank'),
    'dropout of one': (
        {'lora_config': training_config_pb2.LoraConfig(lora_dropout=1.0)},
        'INVALID_FIELD',
        'lora_dropout',
    ),
    'unknown targets': (
        {'lora_config': training_config_pb2.LoraConfig(target_modules=['q_proj', 'w_proj'])},
        'INVALID_FIELD',
        'target_modules',
    ),
    'unknown loss': (
        {'training_config': training_config_pb2.TrainingConfig(loss=training_config_pb2.LossConfig(name='L3'))},
        'UNKNOWN_COMPONENT',
        'loss',
    ),
    'a schedule with too many steps': (
        {'training_config': training_config_pb2.TrainingConfig(lr_scheduler=MANY_STEPS)},
        'INVALID_FIELD',
        'training_config.lr_scheduler.options.milestones',
    ),
    'too many names': (
        {'lora_config': training_config_pb2.LoraConfig(target_modules=['x' * (1 << 20)])},
        'INVALID_FIELD',
        'lora_config',
    ),
    'absent checkpoint': ({'checkpoint_path': 'twinkle://ad-x/weights/y'}, 'CHECKPOINT_NOT_FOUND', ''),
}


@pytest.mark.parametrize('name', BAD_ADAPTERS)
async def test_bad_adapters_are_refused(service, name):
    """An invalid request creates no adapter, and its request id is not used."""
    fields, reason, field = BAD_ADAPTERS[name]
    request = {'request_id': 'r1', 'base_model': service.base_model, **fields}
    call = service.adapters.CreateAdapter(
        adapter_service_pb2.CreateAdapterRequest(**request), metadata=as_tenant('alice')
    )
    failure = await failure_of(call)
    assert failure.reason == reason
    assert field in failure.field
    assert (await service.create()).adapter_id
    listed = await service.adapters.ListAdapters(adapter_service_pb2.ListAdaptersRequest(), metadata=as_tenant('alice'))
    assert len(listed.adapters) == 1


async def test_every_int64_seed_is_accepted(service):
    """Every int64 seed is accepted and reported unchanged."""
    for index, seed in enumerate((0, -1, 2**63 - 1, -(2**63))):
        config = training_config_pb2.LoraConfig(lora_rank=1, seed=seed)
        adapter = await service.create(request_id=f's{index}', lora_config=config)
        assert adapter.lora_config.seed == seed


async def test_adapter_of_another_tenant_is_not_found(service):
    """Calls with another tenant's adapter fail like calls with an unknown id."""
    adapter_id = (await service.create()).adapter_id
    bob = as_tenant('bob')
    for requested_id in (adapter_id, 'ad-none'):
        calls = [
            service.execute(requested_id, 1, tenant='bob', forward_backward=GOOD),
            service.adapters.GetAdapter(adapter_service_pb2.GetAdapterRequest(adapter_id=requested_id), metadata=bob),
            service.adapters.DeleteAdapter(
                adapter_service_pb2.DeleteAdapterRequest(adapter_id=requested_id), metadata=bob
            ),
            service.training.GetOperation(
                training_service_pb2.GetOperationRequest(adapter_id=requested_id, sequence_number=1), metadata=bob
            ),
        ]
        for call in calls:
            failure = await failure_of(call)
            assert (failure.code, failure.reason) == ('NOT_FOUND', 'ADAPTER_NOT_FOUND')
            assert failure.message == f'no adapter {requested_id!r}'
    listed = await service.adapters.ListAdapters(adapter_service_pb2.ListAdaptersRequest(), metadata=bob)
    assert not listed.adapters


async def test_order_repeats_and_gaps(service):
    """A repeat returns the recorded result; a different operation with the same number, and a gap, are refused."""
    adapter_id = (await service.create()).adapter_id
    first = await service.result(adapter_id, 1, forward_backward=GOOD)
    repeated = await service.result(adapter_id, 1, forward_backward=GOOD)
    assert (first.is_replayed, repeated.is_replayed) == (False, True)
    assert repeated.forward == first.forward
    changed = await failure_of(service.execute(adapter_id, 1, zero_grad=operation_pb2.ZeroGrad()))
    assert (changed.code, changed.reason) == ('ABORTED', 'SEQUENCE_REUSED')
    gap = await failure_of(service.execute(adapter_id, 3, zero_grad=operation_pb2.ZeroGrad()))
    assert (gap.code, gap.reason) == ('FAILED_PRECONDITION', 'SEQUENCE_GAP')
    early = service.execute(adapter_id, 3, step=operation_pb2.Step())
    clip = await service.result(adapter_id, 2, clip_grad_norm=operation_pb2.ClipGradNorm())
    assert clip.step.grad_norm > 0
    assert (await early).result.step.step_count == 1


async def test_failed_verb_uses_its_number(service):
    """A step without a gradient fails, and the failure is recorded with its number."""
    adapter_id = (await service.create()).adapter_id
    for _ in range(2):
        failure = await failure_of(service.execute(adapter_id, 1, step=operation_pb2.Step()))
        assert (failure.code, failure.reason) == ('FAILED_PRECONDITION', 'ADAPTER_NOT_READY')
    await service.result(adapter_id, 2, forward_backward=GOOD)


async def test_configuration_changes_are_atomic(service):
    """If one setting is refused, the other settings of the change have no effect."""
    adapter_id = (await service.create()).adapter_id
    change = training_config_pb2.TrainingConfig(
        optimizer=training_config_pb2.OptimizerConfig(name='SGD', learning_rate=0.5),
        loss=training_config_pb2.LossConfig(name='Nothing'),
    )
    verb = operation_pb2.Configure(training_config=change)
    assert (await failure_of(service.execute(adapter_id, 1, configure=verb))).reason == 'UNKNOWN_COMPONENT'
    await service.result(adapter_id, 1, forward_backward=GOOD)
    step = await service.result(adapter_id, 2, step=operation_pb2.Step())
    assert step.step.learning_rate == pytest.approx(1e-3)


async def test_a_refused_operation_of_a_stream_fails_alone(service):
    """The stream returns the failure, and the next operation uses the refused number."""
    adapter_id = (await service.create()).adapter_id

    async def operations():
        for number, verb in ((1, GOOD), (2, operation_pb2.ForwardBackward())):
            operation = operation_of(adapter_id, number, forward_backward=verb)
            yield training_service_pb2.TrainRequest(operation=operation)
        operation = operation_of(adapter_id, 2, zero_grad=operation_pb2.ZeroGrad())
        yield training_service_pb2.TrainRequest(operation=operation)

    results = [response.result async for response in service.training.Train(operations(), metadata=as_tenant('alice'))]
    outcomes = sorted((result.sequence_number, result.HasField('error')) for result in results)
    assert outcomes == [(1, False), (2, False), (2, True)]


async def test_only_services_can_watch_adapters(service):
    """A client may not watch. A service receives the existing adapters, the synced marker and then changes."""
    request = adapter_service_pb2.WatchAdaptersRequest()
    refused = await failure_of(service.adapters.WatchAdapters(request, metadata=as_tenant('alice')))
    assert refused.code == 'PERMISSION_DENIED'
    adapter_id = (await service.create()).adapter_id
    watch = service.internal_adapters.WatchAdapters(request)
    events = aiter(watch)
    first, synced = await anext(events), await anext(events)
    assert (first.tenant_id, first.adapter.adapter_id, synced.is_synced) == ('alice', adapter_id, True)
    await service.result(adapter_id, 1, forward_backward=GOOD)
    assert (await anext(events)).adapter.sequence_number == 1
    watch.cancel()


async def test_deleted_adapter_is_not_found(service):
    """Training or deleting a deleted adapter fails with NOT_FOUND."""
    adapter_id = (await service.create()).adapter_id
    request = adapter_service_pb2.DeleteAdapterRequest(adapter_id=adapter_id)
    await service.adapters.DeleteAdapter(request, metadata=as_tenant('alice'))
    repeated = await failure_of(service.adapters.DeleteAdapter(request, metadata=as_tenant('alice')))
    trained = await failure_of(service.execute(adapter_id, 1, forward_backward=GOOD))
    assert repeated.reason == trained.reason == 'ADAPTER_NOT_FOUND'
