"""Training through the service gives the same results as the engine in this process."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from fixtures.checkpoint_service import ALICE, as_tenant
from fixtures.model_service import batch_of, draw_example, forward_backward, operation_of
from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_config_pb2, training_service_pb2
from twinkle.checkpoint_engine import unpack_state
from twinkle.data_format import LoraConfig
from twinkle.model.engine import TrainerEngine
from twinkle.nn import PackedCausalLM, load_adapter, tensor_of
from twinkle_services.kit.rpc.context import acting_for

LORA = training_config_pb2.LoraConfig(lora_rank=4, lora_dropout=0.1, seed=5)
TRAINING = training_config_pb2.TrainingConfig(
    optimizer=training_config_pb2.OptimizerConfig(learning_rate=1e-2),
    loss=training_config_pb2.LossConfig(reduction=training_config_pb2.LOSS_REDUCTION_MEAN),
)
BATCHES = [[draw_example(10 + step, step), draw_example(17, step + 50)] for step in range(4)]


def train_in_process(folder: Path) -> tuple[TrainerEngine, list[float]]:
    """Return an engine that ran the same steps, and its losses."""
    engine = TrainerEngine(PackedCausalLM.load(folder))
    engine.create_adapter('x', LoraConfig(r=4, lora_dropout=0.1, seed=5))
    engine.set_optimizer('x', 'AdamW', lr=1e-2)
    losses = []
    for batch in BATCHES:
        losses.append(engine.forward_backward('x', batch).loss)
        engine.clip_grad_and_step('x')
    return engine, losses


async def train(service, adapter_id, batches, *, first=1):
    """Run training steps with Execute; return the losses and the next number."""
    losses = []
    for batch in batches:
        result = await service.result(adapter_id, first, forward_backward=forward_backward(batch))
        losses.append(result.forward.loss)
        await service.result(adapter_id, first + 1, clip_grad_and_step=operation_pb2.ClipGradAndStep())
        first += 2
    return losses, first


async def test_results_over_the_wire_are_bitwise_equal(service, tiny_llama_dir):
    """Losses, log-probabilities and published weights are bitwise equal to those of an engine in this process."""
    engine, expected = train_in_process(tiny_llama_dir)
    adapter = await service.create(lora_config=LORA, training_config=TRAINING)
    losses, number = await train(service, adapter.adapter_id, BATCHES)
    assert losses == expected
    result = await service.result(
        adapter.adapter_id, number, forward_only=operation_pb2.ForwardOnly(batch=batch_of(BATCHES[0]))
    )
    logprobs = [np.frombuffer(tensor.data, np.float32) for tensor in result.forward.logprobs]
    for own, other in zip(logprobs, engine.forward_only('x', BATCHES[0]).logps, strict=True):
        np.testing.assert_array_equal(own, other)
    published = await service.result(adapter.adapter_id, number + 1, publish_version=operation_pb2.PublishVersion())
    with acting_for(ALICE):
        received = await service.checkpoints.weights.fetch_version(adapter.adapter_id)
    assert (published.publish.version, published.publish.digest) == (1, received.state.manifest.digest)
    weights = unpack_state(received.state.manifest, received.state.data)
    for name, tensor in engine.adapter('x').weights.peft_state().items():
        assert torch.equal(tensor_of(weights[name]), tensor)


async def test_receipts_and_metrics_describe_the_operations(service):
    """Receipts contain tokens, bytes and times; metrics contain the loss and the step count."""
    adapter = await service.create(lora_config=LORA, training_config=TRAINING)
    result = await service.result(adapter.adapter_id, 1, forward_backward=forward_backward(BATCHES[0]))
    assert result.receipt.token_count == 27
    assert result.receipt.request_bytes > 27 * 8
    assert result.receipt.device_time.ToTimedelta().total_seconds() > 0
    step = await service.result(adapter.adapter_id, 2, clip_grad_and_step=operation_pb2.ClipGradAndStep())
    assert (step.step.is_applied, step.step.step_count, step.step.learning_rate) == (True, 1, 1e-2)
    assert step.step.grad_norm > 0
    metric = await service.result(
        adapter.adapter_id, 3, calculate_metric=operation_pb2.CalculateMetric(is_training=True)
    )
    assert metric.metric.values['loss'] == pytest.approx(result.forward.loss)
    assert metric.metric.values['step_count'] == 1.0


async def test_the_default_loss_is_the_sum(service):
    """The default optimizer is AdamW, and the default loss is the sum of the cross-entropy."""
    adapter = await service.create()
    assert adapter.training_config.optimizer.name == 'AdamW'
    assert adapter.training_config.loss.reduction == training_config_pb2.LOSS_REDUCTION_SUM
    assert adapter.lora_config.HasField('seed')
    result = await service.result(adapter.adapter_id, 1, forward_backward=forward_backward(BATCHES[0]))
    logprobs = [np.frombuffer(tensor.data, np.float32) for tensor in result.forward.logprobs]
    assert result.forward.loss == pytest.approx(-sum(values.sum() for values in logprobs), rel=1e-5)


async def test_saved_checkpoint_resumes_bitwise(service, tiny_llama_dir):
    """An adapter from a checkpoint with its optimizer has bitwise the same losses as the uninterrupted run."""
    engine, expected = train_in_process(tiny_llama_dir)
    first = await service.create(lora_config=LORA, training_config=TRAINING)
    losses, number = await train(service, first.adapter_id, BATCHES[:2])
    saved = await service.result(
        first.adapter_id, number, save=operation_pb2.Save(name='middle', is_optimizer_included=True)
    )
    second = await service.create(
        request_id='r2',
        checkpoint_path=saved.save.checkpoint_path,
        is_optimizer_included=True,
        training_config=TRAINING,
    )
    assert (second.step_count, second.lora_config.seed) == (2, 5)
    resumed_losses, _ = await train(service, second.adapter_id, BATCHES[2:])
    assert losses + resumed_losses == expected
    folder = load_adapter(saved.save.folder, engine.model.layers)
    assert folder.config.r == 4


async def test_load_replaces_the_weights(service):
    """Loading a checkpoint restores the loss that its weights give."""
    adapter = await service.create(lora_config=LORA, training_config=TRAINING)
    forward = operation_pb2.ForwardOnly(batch=batch_of(BATCHES[0]))
    before = await service.result(adapter.adapter_id, 1, forward_only=forward)
    saved = await service.result(adapter.adapter_id, 2, save=operation_pb2.Save(name='begin'))
    _, number = await train(service, adapter.adapter_id, BATCHES, first=3)
    load = operation_pb2.Load(checkpoint_path=saved.save.checkpoint_path)
    await service.result(adapter.adapter_id, number, load=load)
    after = await service.result(adapter.adapter_id, number + 1, forward_only=forward)
    assert after.forward.loss == before.forward.loss


async def test_configure_changes_the_run(service):
    """Optimizer, schedule and accumulation change together, and the adapter reports them."""
    adapter = await service.create(lora_config=LORA)
    schedule = training_config_pb2.SchedulerConfig(name='CosineWarmupScheduler')
    schedule.options.update({'num_warmup_steps': 2, 'num_training_steps': 10})
    change = training_config_pb2.TrainingConfig(
        optimizer=training_config_pb2.OptimizerConfig(name='SGD', learning_rate=0.5),
        lr_scheduler=schedule,
        gradient_accumulation_steps=2,
        template=training_config_pb2.ComponentConfig(name='Template'),
    )
    result = await service.result(adapter.adapter_id, 1, configure=operation_pb2.Configure(training_config=change))
    assert len(result.warnings) == 1
    number = 2
    rates = []
    for batch in BATCHES:
        await service.result(adapter.adapter_id, number, forward_backward=forward_backward(batch))
        step = await service.result(adapter.adapter_id, number + 1, clip_grad_and_step=operation_pb2.ClipGradAndStep())
        rates.append((step.step.is_applied, step.step.learning_rate))
        number += 2
    assert rates == [(False, 0.0), (True, 0.0), (False, 0.25), (True, 0.25)]
    current = (await service.adapters.GetAdapter(_get(adapter), metadata=as_tenant('alice'))).adapter
    assert (current.training_config.optimizer.name, current.training_config.lr_scheduler.name) == ('SGD', schedule.name)
    assert (current.step_count, current.sequence_number) == (2, number - 1)


async def test_a_stream_is_pipelined_and_returns_results_in_order(service):
    """Operations of two adapters are sent in one stream, and the results of each adapter arrive in order."""
    adapters = [
        (await service.create(request_id=f'r{index}', lora_config=LORA, training_config=TRAINING)).adapter_id
        for index in range(2)
    ]

    async def operations():
        for step, batch in enumerate(BATCHES):
            for adapter_id in adapters:
                number = 2 * step + 1
                yield _train(operation_of(adapter_id, number, forward_backward=forward_backward(batch)))
                yield _train(operation_of(adapter_id, number + 1, clip_grad_and_step=operation_pb2.ClipGradAndStep()))

    results = [response.result async for response in service.training.Train(operations(), metadata=as_tenant('alice'))]
    numbers = {a: [r.sequence_number for r in results if r.adapter_id == a] for a in adapters}
    assert all(numbers[adapter_id] == list(range(1, 9)) for adapter_id in adapters)
    losses = {a: [r.forward.loss for r in results if r.adapter_id == a and r.HasField('forward')] for a in adapters}
    assert losses[adapters[0]] == losses[adapters[1]]


async def test_concurrent_training_is_bitwise_equal_to_separate_training(service, tiny_llama_dir):
    """Two tenants that train at the same time get bitwise the same losses as the engine in this process."""
    _, expected = train_in_process(tiny_llama_dir)
    runs = []
    for tenant in ('alice', 'bob'):
        adapter = await service.create(tenant=tenant, lora_config=LORA, training_config=TRAINING)
        runs.append((tenant, adapter.adapter_id))

    async def run(tenant, adapter_id):
        losses = []
        for step, batch in enumerate(BATCHES):
            verb = forward_backward(batch)
            result = await service.result(adapter_id, 2 * step + 1, tenant=tenant, forward_backward=verb)
            losses.append(result.forward.loss)
            verb = operation_pb2.ClipGradAndStep()
            await service.result(adapter_id, 2 * step + 2, tenant=tenant, clip_grad_and_step=verb)
        return losses

    assert await asyncio.gather(*(run(*item) for item in runs)) == [expected, expected]


def _get(adapter):
    return adapter_service_pb2.GetAdapterRequest(adapter_id=adapter.adapter_id)


def _train(operation):
    return training_service_pb2.TrainRequest(operation=operation)
