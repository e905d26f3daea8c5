"""Tests of the critic, and of saved value heads."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from twinkle.data_format import LoraConfig
from twinkle.model import (
    InvalidArgument,
    ModelLeased,
    MultiLoraTransformersModel,
    SnapshotMismatch,
    TransformersModel,
    TransformersValueModel,
)

CONFIG = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, seed=1)
TARGETS = {'returns': [0.15, -0.1], 'old_values': [0.0, 0.0]}


@pytest.fixture
def features(make_feature) -> list:
    """Two examples."""
    return [make_feature(9, 1), make_feature(12, 2)]


def learn(model: TransformersModel, features: list, steps: int) -> list[float]:
    """Train for `steps` steps with the same target returns; return the losses."""
    losses: list[float] = []
    for _ in range(steps):
        losses.append(model.forward_backward(features, **TARGETS)['loss'])
        model.clip_grad_and_step()
    return losses


def values(model: TransformersModel, features: list) -> np.ndarray:
    """Return the values of both examples."""
    return model.forward_only(features, **TARGETS)['values']


def head_of(model: TransformersModel) -> torch.Tensor:
    """Return the weight of the only adapter's value head."""
    return model.engine.adapter(model.chosen_adapter()).value_head.weight_1D


def test_critic_without_adapter_trains_the_whole_model(tiny_llama_dir, features):
    """A critic without an adapter initially predicts 0 and trains all weights; removing it restores the model."""
    critic = TransformersValueModel(str(tiny_llama_dir))
    before = {name: tensor.clone() for name, tensor in critic.engine.model.base_parameters.items()}
    critic.set_optimizer('AdamW', lr=1e-3)
    assert values(critic, features).shape == (2, 12)
    assert not values(critic, features).any()
    losses = learn(critic, features, 20)
    assert losses[-1] < losses[0] / 10
    trained = critic.get_state_dict()
    assert trained.keys() == before.keys()
    assert not any(torch.equal(before[name], tensor) for name, tensor in trained.items())
    assert 'base model' in critic.get_train_configs()
    critic.remove_adapter('default')
    assert all(torch.equal(before[name], tensor) for name, tensor in critic.engine.model.base_parameters.items())


def test_full_critic_gradient(tiny_llama_dir, features):
    """The backbone gradient with a nonzero head equals the gradient of the same formula in transformers."""
    critic = TransformersValueModel(str(tiny_llama_dir))
    critic.set_optimizer('SGD', lr=0.0)
    critic.forward_only(features, **TARGETS)
    weight = torch.linspace(-1, 1, head_of(critic).numel()).reshape(1, -1)
    with torch.no_grad():
        head_of(critic).copy_(weight)
    oracle = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32)
    loss, count = 0.0, 0
    for feature, target in zip(features, TARGETS['returns'], strict=True):
        hidden = oracle.model(torch.as_tensor(feature['input_ids'])[None]).last_hidden_state[0]
        value = (hidden @ weight[0])[torch.as_tensor(feature['labels']) != -100]
        loss = loss + 0.5 * (value - target).square().maximum((value.clamp(-0.2, 0.2) - target).square()).sum()
        count += len(value)
    loss.backward()
    critic.forward_backward(features, **TARGETS)
    own = critic.engine.model.base_parameters
    for name, parameter in oracle.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-3, atol=1e-4 * count)


def test_lora_critic(tiny_llama_dir, features):
    """A LoRA critic lowers its loss and prevents full-parameter training of the same model."""
    critic = TransformersValueModel(str(tiny_llama_dir))
    critic.add_adapter_to_model('critic', CONFIG)
    critic.set_optimizer('AdamW', lr=1e-2)
    losses = learn(critic, features, 10)
    assert losses[-1] < losses[0]
    with pytest.raises(ModelLeased):
        critic.add_adapter_to_model('default', full_parameters=True)
    with pytest.raises(InvalidArgument):
        critic.add_adapter_to_model('default', CONFIG, full_parameters=True)
    assert critic.engine.adapter_ids == ('critic',)


@pytest.mark.parametrize('config', [None, CONFIG], ids=['full', 'lora'])
def test_critic_resumes_bitwise(tiny_llama_dir, tmp_path: Path, features, config):
    """A saved and resumed critic continues bitwise, with LoRA and with full-parameter training."""
    first, second = (TransformersValueModel(str(tiny_llama_dir)) for _ in range(2))
    for critic in (first, second):
        critic.add_adapter_to_model('critic', config, full_parameters=config is None)
    first.set_optimizer('AdamW', lr=1e-3)
    learn(first, features, 3)
    folder = first.save('middle', str(tmp_path), save_optimizer=True)
    assert second.resume_from_checkpoint(folder)['cur_step'] == 3
    assert learn(first, features, 3) == learn(second, features, 3)
    states = [critic.get_state_dict() for critic in (first, second)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert torch.equal(head_of(first), head_of(second))


@pytest.mark.parametrize('config', [None, CONFIG], ids=['full', 'lora'])
def test_value_head_is_loaded_without_optimizer(tiny_llama_dir, tmp_path: Path, features, config):
    """A critic that was saved without an optimizer gives the same values after loading."""
    first, second = (TransformersValueModel(str(tiny_llama_dir)) for _ in range(2))
    for critic in (first, second):
        critic.add_adapter_to_model('critic', config, full_parameters=config is None)
        critic.set_optimizer('AdamW', lr=1e-3)
    learn(first, features, 3)
    folder = first.save('plain', str(tmp_path))
    second.load('plain', str(tmp_path))
    assert np.array_equal(values(first, features), values(second, features))
    assert values(first, features).any()
    with pytest.raises(SnapshotMismatch):
        second.resume_from_checkpoint(folder)
    if config is None:
        assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32


def test_value_head_in_the_trainer_state_is_loaded(tiny_llama_dir, tmp_path: Path, features):
    """A value head that is only in the trainer state, where the checkpoint service stores it, is loaded too."""
    first, second = (TransformersValueModel(str(tiny_llama_dir)) for _ in range(2))
    for critic in (first, second):
        critic.add_adapter_to_model('critic', CONFIG)
        critic.set_optimizer('AdamW', lr=1e-2)
    learn(first, features, 3)
    folder = Path(first.save('whole', str(tmp_path), save_optimizer=True))
    (folder / 'value_head.safetensors').unlink()
    second.load('whole', str(tmp_path))
    assert np.array_equal(values(first, features), values(second, features))
    assert values(first, features).any()


def test_mismatched_checkpoint_is_refused(tiny_llama_dir, tmp_path: Path, features):
    """A value head of the wrong width changes nothing; a critic without an adapter refuses a LoRA checkpoint."""
    critic = TransformersValueModel(str(tiny_llama_dir))
    critic.add_adapter_to_model('critic', CONFIG)
    critic.set_optimizer('AdamW', lr=1e-2)
    learn(critic, features, 2)
    folder = Path(critic.save('odd', str(tmp_path)))
    before = values(critic, features)
    save_file(
        {'value_head.weight': torch.ones(1, 3), 'value_head.bias': torch.ones(1)}, folder / 'value_head.safetensors'
    )
    with pytest.raises(SnapshotMismatch):
        critic.load('odd', str(tmp_path))
    whole = TransformersValueModel(str(tiny_llama_dir))
    with pytest.raises(SnapshotMismatch):
        whole.load('odd', str(tmp_path))
    assert np.array_equal(before, values(critic, features))


def test_value_head_of_an_initial_folder_is_loaded(tiny_llama_dir, tmp_path: Path, features):
    """An adapter that starts from a critic's folder has the critic's values."""
    model = MultiLoraTransformersModel(str(tiny_llama_dir), max_loras=2)
    model.add_adapter_to_model('critic', CONFIG)
    model.set_loss('PPOValueLoss', adapter_name='critic')
    model.set_optimizer('AdamW', lr=1e-2, adapter_name='critic')
    learn(model, features, 3)
    folder = model.save('critic', str(tmp_path))
    model.add_adapter_to_model('twin', folder)
    outputs = [model.forward_only(features, adapter_name=name, **TARGETS)['values'] for name in ('critic', 'twin')]
    assert np.array_equal(*outputs)
