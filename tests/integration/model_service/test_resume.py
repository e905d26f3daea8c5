"""A run resumes from a checkpoint with a new adapter after a restart, or loads it without the optimizer."""

from pathlib import Path

import grpc
import pytest

from fixtures.model_service import draw_example, forward_backward, serving_model
from twinkle.api.model.v1 import operation_pb2 as wire
from twinkle.api.model.v1 import training_config_pb2
from twinkle.model.checkpoint_folder import read_checkpoint
from twinkle.model.engine.snapshot import trainer_state

LORA = training_config_pb2.LoraConfig(lora_rank=4, lora_dropout=0.2, seed=3)
TRAINING = training_config_pb2.TrainingConfig(
    optimizer=training_config_pb2.OptimizerConfig(learning_rate=1e-2),
    lr_scheduler=training_config_pb2.SchedulerConfig(
        name='CosineWarmupScheduler', options={'num_warmup_steps': 2, 'num_training_steps': 10}
    ),
    gradient_accumulation_steps=1,
)
BATCHES = [[draw_example(9 + step, step), draw_example(14, step + 20)] for step in range(5)]


async def train(model, adapter_id, batches, *, first):
    """Run training steps; return the loss, norm, learning rate and step count of each."""
    results = []
    for number, batch in enumerate(batches):
        sequence_number = first + 2 * number
        batch_result = await model.result(adapter_id, sequence_number, forward_backward=forward_backward(batch))
        step = await model.result(adapter_id, sequence_number + 1, clip_grad_and_step=wire.ClipGradAndStep())
        results.append((batch_result.forward.loss, step.step.grad_norm, step.step.learning_rate, step.step.step_count))
    return results


async def test_another_adapter_continues_a_run_after_a_restart(tiny_llama_dir, tmp_path):
    """Losses, norms, learning rates and counters of a resumed run equal those of the uninterrupted run."""
    async with serving_model(tiny_llama_dir, tmp_path) as model:
        first = await model.create(lora_config=LORA, training_config=TRAINING)
        await train(model, first.adapter_id, BATCHES[:3], first=1)
        save = wire.Save(name='third', is_optimizer_included=True, consumed_train_samples=6)
        saved = (await model.result(first.adapter_id, 7, save=save)).save
        # The library reads the same counters from the folder of the checkpoint.
        state = trainer_state(read_checkpoint(Path(saved.folder)))
        assert (state['step_count'], state['extra']) == (3, {'consumed_train_samples': 6})
        path = saved.checkpoint_path
        expected = await train(model, first.adapter_id, BATCHES[3:], first=8)
        second = await model.create(request_id='r2', lora_config=LORA)
        await train(model, second.adapter_id, BATCHES[4:], first=1)
    load = wire.Load(checkpoint_path=path, is_optimizer_included=True)
    async with serving_model(tiny_llama_dir, tmp_path) as model:
        loaded = await model.result(second.adapter_id, 3, load=load)
        assert (loaded.load.step_count, loaded.load.consumed_train_samples) == (3, 6)
        assert loaded.load.gradient_accumulation_steps == 1
        resumed = await train(model, second.adapter_id, BATCHES[3:4], first=4)
    async with serving_model(tiny_llama_dir, tmp_path) as model:
        repeated = await model.result(second.adapter_id, 3, load=load)
        assert (repeated.is_replayed, repeated.load) == (True, loaded.load)
        assert resumed + await train(model, second.adapter_id, BATCHES[4:], first=6) == expected
        third = await model.create(request_id='r3', checkpoint_path=path, is_optimizer_included=True)
        assert await train(model, third.adapter_id, BATCHES[3:], first=1) == expected


async def test_cursor_is_loaded_only_with_the_optimizer(service):
    """Only a load with the optimizer returns a saved cursor; a load of the weights alone keeps the step count."""
    adapter = await service.create(lora_config=LORA)
    await train(service, adapter.adapter_id, BATCHES[:1], first=1)
    paths = []
    for number, fields in enumerate(({}, {'consumed_train_samples': 2}), 3):
        save = wire.Save(name=f'save-{number}', is_optimizer_included=True, **fields)
        paths.append((await service.result(adapter.adapter_id, number, save=save)).save.checkpoint_path)
    await train(service, adapter.adapter_id, BATCHES[:1], first=5)
    loads = [
        wire.Load(checkpoint_path=paths[0], is_optimizer_included=True),
        wire.Load(checkpoint_path=paths[1], is_optimizer_included=True),
        wire.Load(checkpoint_path=paths[1]),
    ]
    loaded = [
        (await service.result(adapter.adapter_id, number, load=load)).load for number, load in enumerate(loads, 7)
    ]
    assert [result.HasField('consumed_train_samples') for result in loaded] == [False, True, False]
    assert [result.HasField('gradient_accumulation_steps') for result in loaded] == [True, True, False]
    assert [result.step_count for result in loaded] == [1, 1, 1]


async def test_a_cursor_without_an_optimizer_is_refused(service):
    """The error for a save with a cursor but no optimizer names the field, and the number is not used."""
    adapter = await service.create(lora_config=LORA)
    with pytest.raises(grpc.aio.AioRpcError, match='consumed_train_samples') as refusal:
        await service.execute(adapter.adapter_id, 1, save=wire.Save(name='a', consumed_train_samples=3))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await service.result(adapter.adapter_id, 1, save=wire.Save(name='a'))).save.size_bytes > 0


async def test_load_discards_a_pending_forward(service):
    """A load discards a pending Forward, so a following Backward fails, and training continues."""
    adapter = await service.create(lora_config=LORA)
    saved = await service.result(adapter.adapter_id, 1, save=wire.Save(name='begin'))
    await service.result(adapter.adapter_id, 2, forward=wire.Forward(batch=forward_backward(BATCHES[0]).batch))
    await service.result(adapter.adapter_id, 3, load=wire.Load(checkpoint_path=saved.save.checkpoint_path))
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await service.execute(adapter.adapter_id, 4, backward=wire.Backward())
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (await train(service, adapter.adapter_id, BATCHES[:1], first=5))[0][3] == 1
