"""Tenants that share passes of the small real model get results bitwise equal to those of separate runs."""

import numpy as np
import pytest

from twinkle.data_format import LoraConfig
from twinkle.hub import get_model
from twinkle.model.engine import BatchItem, TrainerEngine
from twinkle.nn import PackedCausalLM

TENANTS = {
    'small': LoraConfig(r=4, lora_alpha=8, seed=1),
    'large': LoraConfig(r=32, lora_alpha=64, seed=2, lora_dropout=0.1),
    'narrow': LoraConfig(r=8, target_modules=('q_proj', 'v_proj'), seed=3, use_rslora=True),
    'patterned': LoraConfig(r=8, rank_pattern={'down_proj': 2}, alpha_pattern={'q_proj': 3}, seed=4),
}
LOSSES = {'small': 'CrossEntropyLoss', 'large': 'GRPOLoss', 'narrow': 'cross_entropy', 'patterned': 'DPOLoss'}
LENGTHS = {'small': (5, 40), 'large': (64, 3), 'narrow': (17,), 'patterned': (24, 31)}


def batch_of(name, step):
    """Return a batch of random tokens for a tenant, with the inputs of its loss."""
    rng = np.random.default_rng([step, *name.encode()])
    features = []
    for length in LENGTHS[name]:
        ids = rng.integers(10, 40000, length + 1)
        feature = {'input_ids': ids[:-1], 'labels': ids[1:]}
        if name == 'large':
            feature |= {'advantages': rng.normal(size=length), 'old_logps': np.full(length, -9.0)}
        if name == 'patterned':
            feature |= {'ref_logps': np.full(length, -9.0)}
        features.append(feature)
    return features


def engine_of(model, names):
    """Return a trainer with configured adapters for the tenants."""
    engine = TrainerEngine(model)
    for name in names:
        engine.create_adapter(name, TENANTS[name])
        engine.set_optimizer(name, 'AdamW', lr=1e-3)
        engine.set_loss(name, LOSSES[name])
    return engine


@pytest.mark.slow
def test_shared_passes_of_a_real_model_equal_separate_runs_bitwise():
    """Tenants with different ranks, targets, losses and lengths get results bitwise equal to those of separate runs."""
    model = PackedCausalLM.load(get_model('smollm2-135m-instruct'))
    shared = engine_of(model, TENANTS)
    alone = {name: engine_of(model, [name]) for name in TENANTS}
    for step in range(2):
        items = [BatchItem(adapter_id=name, features=batch_of(name, step), is_training=True) for name in TENANTS]
        for item, result in zip(items, shared.run_batch(items), strict=True):
            expected = alone[item.adapter_id].run_batch([item])[0]
            assert result.pass_adapter_count == len(TENANTS)
            assert result.loss_sum == expected.loss_sum
            assert [values.tobytes() for values in result.logps] == [values.tobytes() for values in expected.logps]
            for engine in (shared, alone[item.adapter_id]):
                engine.clip_grad_and_step(item.adapter_id)
    for name, engine in alone.items():
        pairs = zip(shared.adapter(name).parameters(), engine.adapter(name).parameters(), strict=True)
        assert all(own.detach().numpy().tobytes() == other.detach().numpy().tobytes() for own, other in pairs)
