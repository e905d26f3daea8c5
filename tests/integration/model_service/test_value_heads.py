"""Value heads in the model service: values, checkpoints and restarts."""

from pathlib import Path

import numpy as np

from fixtures.model_service import serving_model
from twinkle.api.model.v1 import operation_pb2 as wire
from twinkle.api.model.v1 import training_config_pb2
from twinkle.data_format import LoraConfig
from twinkle.model import MultiLoraTransformersModel
from twinkle_client.model.forward import forward_fields, forward_output

LORA = training_config_pb2.LoraConfig(lora_rank=4, seed=3)
TRAINING = training_config_pb2.TrainingConfig(
    loss=training_config_pb2.LossConfig(name='PPOValueLoss'),
    optimizer=training_config_pb2.OptimizerConfig(learning_rate=1e-2),
    gradient_accumulation_steps=1,
)
FEATURES = [
    {'input_ids': np.arange(5, 15), 'labels': np.where(np.arange(10) < 4, -100, np.arange(6, 16))},
    {'input_ids': np.arange(20, 27), 'labels': np.arange(21, 28)},
]
TARGETS = {'returns': [0.15, -0.1], 'old_values': [0.0, 0.0]}
STEP = wire.ClipGradAndStep()


async def learn(model, adapter_id: str, *, first: int, steps: int) -> list[list[np.ndarray]]:
    """Train for some steps with the same target returns; return the values of each step."""
    seen = []
    for number in range(first, first + 2 * steps, 2):
        result = await model.result(adapter_id, number, forward_backward=forward_fields(FEATURES, TARGETS))
        seen.append(forward_output(result)['values'])
        await model.result(adapter_id, number + 1, clip_grad_and_step=STEP)
    return seen


def learn_in_process(folder: Path, steps: int) -> list[np.ndarray]:
    """Take the same steps with the library in this process; return the padded values."""
    model = MultiLoraTransformersModel(str(folder))
    model.add_adapter_to_model('critic', LoraConfig(r=4, seed=3))
    model.set_loss('PPOValueLoss')
    model.set_optimizer('AdamW', lr=1e-2)
    seen = []
    for _ in range(steps):
        seen.append(model.forward_backward(FEATURES, **TARGETS)['values'])
        model.clip_grad_and_step()
    return seen


async def test_values_equal_those_of_the_library(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Values are bitwise equal to those of the library, and zero before training.

    An adapter without a value head, and a request without log-probabilities, return no values.
    """
    async with serving_model(tiny_llama_dir, tmp_path) as model:
        critic = (await model.create(lora_config=LORA, training_config=TRAINING)).adapter_id
        seen = await learn(model, critic, first=1, steps=4)
        without_logps = forward_fields(FEATURES, {**TARGETS, 'return_logps': False})
        assert forward_output(await model.result(critic, 9, forward_only=without_logps))['values'] == []
        policy = (await model.create(request_id='r2', lora_config=LORA)).adapter_id
        plain = await model.result(policy, 1, forward_only=forward_fields(FEATURES, {}))
        assert forward_output(plain)['values'] == []
    assert not any(row.any() for row in seen[0])
    assert not seen[-1][0][:4].any()
    for served, own in zip(seen, learn_in_process(tiny_llama_dir, 4), strict=True):
        assert all(np.array_equal(row, own_row[: len(row)]) for row, own_row in zip(served, own, strict=True))


async def test_critic_continues_from_its_checkpoint_after_a_restart(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """An adapter that loads a checkpoint has bitwise the same values as the saved run; repeats return recorded ones."""
    async with serving_model(tiny_llama_dir, tmp_path) as model:
        first = (await model.create(lora_config=LORA, training_config=TRAINING)).adapter_id
        before = await learn(model, first, first=1, steps=3)
        save = wire.Save(name='third', is_optimizer_included=True)
        saved = await model.result(first, 7, save=save)
        path = saved.save.checkpoint_path
        assert not saved.warnings
        expected = await learn(model, first, first=8, steps=2)
        plain = await model.result(first, 12, save=wire.Save(name='plain'))
        assert len(plain.warnings) == 1
    async with serving_model(tiny_llama_dir, tmp_path) as model:
        repeated = await model.result(first, 5, forward_backward=forward_fields(FEATURES, TARGETS))
        assert repeated.is_replayed
        assert all(map(np.array_equal, forward_output(repeated)['values'], before[2]))
        second = (await model.create(request_id='r2', lora_config=LORA, training_config=TRAINING)).adapter_id
        await model.result(second, 1, load=wire.Load(checkpoint_path=path, is_optimizer_included=True))
        resumed = await learn(model, second, first=2, steps=2)
    for one, other in zip(expected, resumed, strict=True):
        assert all(map(np.array_equal, one, other))
        assert any(row.any() for row in one)
