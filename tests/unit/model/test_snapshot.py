"""Tests of saving and restoring an adapter's state."""

import json

import pytest
import torch

from twinkle.data_format import LoraConfig, TensorData
from twinkle.model.engine import AdapterSnapshot, TrainerEngine
from twinkle.model.engine.snapshot import STATE_TENSOR
from twinkle.model.errors import SnapshotMismatch

CONFIG = LoraConfig(r=4, lora_dropout=0.3, seed=7)


def new_engine(model, config=CONFIG):
    """Return a trainer with one adapter that accumulates two batches per step."""
    engine = TrainerEngine(model)
    engine.create_adapter('a', config, gradient_accumulation_steps=2)
    return engine


def run(engine, features):
    """Train on the features one by one; return all losses."""
    losses = []
    for feature in features:
        losses.append(engine.forward_backward('a', [feature]).loss)
        engine.clip_grad_and_step('a')
    return losses


OPTIMIZERS = [
    ('AdamW', {'lr': 1e-2, 'betas': [0.9, 0.95]}),
    ('SGD', {'lr': 0.1, 'momentum': 0.9}),
    ('Adafactor', {'lr': 1e-2}),
]
SCHEDULERS = [
    ('CosineWarmupScheduler', {'num_warmup_steps': 1, 'num_training_steps': 6}),
    ('OneCycleLR', {'max_lr': 0.1, 'total_steps': 8}),
    ('MultiStepLR', {'milestones': [1, 3]}),
]


@pytest.mark.parametrize(('optimizer', 'scheduler'), list(zip(OPTIMIZERS, SCHEDULERS, strict=True)))
def test_resume_continues_bitwise(model, make_feature, optimizer, scheduler):
    """A run that resumes in the middle of an accumulated step continues bitwise."""
    features = [make_feature(10 + step, step) for step in range(9)]
    original = new_engine(model)
    original.set_optimizer('a', optimizer[0], **optimizer[1])
    original.set_lr_scheduler('a', scheduler[0], **scheduler[1])
    run(original, features[:5])
    snapshot = original.export_state('a', is_optimizer_included=True)
    expected = run(original, features[5:])
    resumed = new_engine(model)
    resumed.import_state('a', snapshot, is_optimizer_included=True)
    assert run(resumed, features[5:]) == expected
    first, second = (engine.adapter('a') for engine in (original, resumed))
    assert (first.step_count, first.learning_rate) == (second.step_count, second.learning_rate)
    pairs = zip(first.weights.parameters(), second.weights.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_loading_weights_does_not_load_the_optimizer(model, make_feature):
    """Loading a checkpoint without its optimizer changes only the weights."""
    engine = new_engine(model)
    run(engine, [make_feature(10, step) for step in range(4)])
    snapshot = engine.export_state('a', is_optimizer_included=False)
    other = new_engine(model)
    other.import_state('a', snapshot, is_optimizer_included=False)
    assert snapshot.trainer is None
    assert other.adapter('a').step_count == 0
    feature = make_feature(9, 9)
    assert other.forward_only('a', [feature]).loss == engine.forward_only('a', [feature]).loss
    with pytest.raises(SnapshotMismatch, match='no optimizer state'):
        other.import_state('a', snapshot, is_optimizer_included=True)


@pytest.mark.parametrize(
    'config', [LoraConfig(r=8, seed=7), LoraConfig(r=4, target_modules=('q_proj',)), LoraConfig(r=4, lora_alpha=99)]
)
def test_another_configuration_is_refused(model, config):
    """A snapshot with other target layers, rank or scaling is refused and changes no weights."""
    snapshot = new_engine(model, config).export_state('a', is_optimizer_included=True)
    engine = new_engine(model)
    before = [parameter.clone() for parameter in engine.adapter('a').weights.parameters()]
    with pytest.raises(SnapshotMismatch):
        engine.import_state('a', snapshot, is_optimizer_included=True)
    after = engine.adapter('a').weights.parameters()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def _broken(numbers, change):
    changed = json.dumps({**numbers, **change}).encode()
    return TensorData('uint8', (len(changed),), changed)


@pytest.mark.parametrize(
    'change',
    [
        {'format': 3},
        {'optimizer': {'name': 'Evil', 'options': {}}},
        {'optimizer': {'name': 'AdamW', 'options': {'x': 1}}},
        {'optimizer_numbers': {'scalars': {}, 'param_groups': []}},
        {'optimizer_numbers': None},
        {'step_count': None},
        {'step_count': 1e300},
        {'step_count': -1},
        {'divisor': 10**400},
        {'batch_count': True},
        {'grad_norm': 10**400},
        {'lr_scheduler': {'name': 'LambdaLR', 'options': {}}},
    ],
)
def test_malformed_trainer_state_is_refused(model, make_feature, change):
    """A malformed trainer state is refused and changes nothing."""
    engine = new_engine(model)
    run(engine, [make_feature(10, step) for step in range(3)])
    snapshot = engine.export_state('a', is_optimizer_included=True)
    numbers = json.loads(bytes(snapshot.trainer[STATE_TENSOR].data))
    trainer = {**snapshot.trainer, STATE_TENSOR: _broken(numbers, change)}
    broken = AdapterSnapshot(snapshot.lora_config, snapshot.adapter, trainer, snapshot.step_count)
    optimizer = engine.adapter('a').optimizer
    with pytest.raises(SnapshotMismatch):
        engine.import_state('a', broken, is_optimizer_included=True)
    assert engine.adapter('a').optimizer is optimizer
    assert engine.adapter('a').batch_count == 1


def test_format_1_is_loaded(model, make_feature):
    """A run resumes bitwise from a checkpoint in format 1."""
    features = [make_feature(10 + step, step) for step in range(7)]
    original = new_engine(model)
    original.set_optimizer('a', 'AdamW', lr=1e-2)
    original.set_lr_scheduler('a', 'CosineWarmupScheduler', num_warmup_steps=1, num_training_steps=6)
    run(original, features[:5])
    snapshot = original.export_state('a', is_optimizer_included=True)
    numbers = json.loads(bytes(snapshot.trainer[STATE_TENSOR].data))
    optimizer = numbers.pop('optimizer_numbers')
    del numbers['grad_norm']
    old = {'format': 1, 'optimizer_scalars': optimizer['scalars'], 'param_groups': optimizer['param_groups']}
    trainer = {**snapshot.trainer, STATE_TENSOR: _broken(numbers, old)}
    resumed = new_engine(model)
    resumed.import_state(
        'a', AdapterSnapshot(CONFIG, snapshot.adapter, trainer, snapshot.step_count), is_optimizer_included=True
    )
    assert run(resumed, features[5:]) == run(original, features[5:])
    first, second = (engine.adapter('a').weights.parameters() for engine in (original, resumed))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
