"""Tests of full-parameter training: the lease, its snapshots, and its end."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fixtures.tiny_model import build_tiny_model
from twinkle.data_format import InputFeature, LoraConfig
from twinkle.model.engine import TrainerEngine
from twinkle.model.errors import ModelLeased, SnapshotMismatch
from twinkle.nn import PackedCausalLM

FEATURES = [InputFeature(input_ids=list(range(5, 30)), labels=list(range(6, 31)))]


@pytest.fixture
def engine_of(tmp_path: Path) -> Callable[[], TrainerEngine]:
    """Factory of engines over the same tiny model."""
    folder = build_tiny_model(tmp_path / 'model')
    return lambda: TrainerEngine(PackedCausalLM.load(folder))


def _train(engine: TrainerEngine, adapter_id: str, steps: int) -> float:
    loss = 0.0
    for _ in range(steps):
        loss = engine.forward_backward(adapter_id, FEATURES).loss
        engine.clip_grad_and_step(adapter_id)
    return loss


def test_loss_falls_and_the_base_is_restored(engine_of: Callable[[], TrainerEngine]) -> None:
    """Full-parameter training lowers the loss, and the base model is restored bitwise when the lease ends."""
    engine = engine_of()
    engine.create_adapter('lora', LoraConfig(r=4, seed=1))
    before = engine.forward_only('lora', FEATURES)
    engine.delete_adapter('lora')
    engine.create_full_adapter('full')
    engine.set_optimizer('full', 'AdamW', lr=1e-3)
    first = _train(engine, 'full', 1)
    assert _train(engine, 'full', 10) < 0.8 * first
    engine.delete_adapter('full')
    engine.create_adapter('lora', LoraConfig(r=4, seed=1))
    after = engine.forward_only('lora', FEATURES)
    assert np.array_equal(before.logps[0], after.logps[0])


def test_lease_is_exclusive(engine_of: Callable[[], TrainerEngine]) -> None:
    """A lease excludes adapters and other leases; a refused attempt creates no adapter."""
    engine = engine_of()
    engine.create_adapter('lora', LoraConfig(r=4))
    with pytest.raises(ModelLeased):
        engine.create_full_adapter('full')
    engine.delete_adapter('lora')
    engine.create_full_adapter('full')
    with pytest.raises(ModelLeased):
        engine.create_adapter('lora', LoraConfig(r=4))
    with pytest.raises(ModelLeased):
        engine.create_full_adapter('another')
    assert engine.adapter_ids == ('full',)


def test_restored_lease_continues_bitwise(engine_of: Callable[[], TrainerEngine]) -> None:
    """A lease that is restored from a snapshot in another engine takes bitwise the same steps as the original."""
    engine, restored = engine_of(), engine_of()
    engine.create_full_adapter('full', ['mlp', 'embed_tokens'])
    _train(engine, 'full', 2)
    engine.forward_backward('full', FEATURES)
    snapshot = engine.snapshot('full')
    assert snapshot is not None
    restored.restore_adapter('full', snapshot)
    for one in (engine, restored):
        one.step('full')
        one.zero_grad('full')
    assert _train(engine, 'full', 2) == _train(restored, 'full', 2)
    own, other = engine.adapter('full').weights.peft_state(), restored.adapter('full').weights.peft_state()
    assert all(torch.equal(own[name], other[name]) for name in own)


def test_malformed_snapshot_leaves_the_base_unchanged(engine_of: Callable[[], TrainerEngine]) -> None:
    """A malformed snapshot is refused, and the lease that its restoration started ends."""
    engine, restored = engine_of(), engine_of()
    engine.create_full_adapter('full')
    snapshot = engine.snapshot('full')
    assert snapshot is not None
    trainer = {name: data for name, data in (snapshot.trainer or {}).items() if name != 'dropout_generator'}
    broken = type(snapshot)(None, snapshot.adapter, trainer, 0, snapshot.full_parameters)
    with pytest.raises(SnapshotMismatch):
        restored.restore_adapter('full', broken)
    assert not any(parameter.requires_grad for parameter in restored.model.base_parameters.values())
    restored.create_adapter('lora', LoraConfig(r=4))
