"""Tests that an adapter that is restored from a complete snapshot continues bitwise."""

import random

import pytest

from twinkle.component import InvalidComponentOptions
from twinkle.data_format import LoraConfig, TensorData
from twinkle.metric import METRICS
from twinkle.model.engine import AdapterSnapshot, ForwardOptions, TrainerEngine
from twinkle.model.engine.snapshot import RANDOM_STATE, STATE_TENSOR
from twinkle.model.errors import AdapterExists, AdapterNotReady, SnapshotMismatch, UnknownAdapter
from twinkle.module import optimizer_names, scheduler_names

CLOCK_VALUES = {
    name for metric in METRICS.names for name in METRICS.build(metric, {}).wall_clock_values
}  # fmt: skip
"""Metric values that depend on the wall clock and are therefore not compared."""


def state_of(engine):
    """Return the adapter's tensors, counters, components, metrics and random state as comparable values."""
    state = engine.adapter('a')
    tensors = [
        tensor.numpy(force=True).tobytes()
        for item in state.parameters()
        for tensor in (item.detach(), item.grad)
        if tensor is not None
    ]
    names = ('batch_count', 'divisor', 'step_count', 'grad_norm', 'gradient_accumulation_steps', 'learning_rate')
    choices = (state.loss_choice, state.processor_choice, state.optimizer_choice, state.scheduler_choice)
    return (
        tensors,
        [getattr(state, name) for name in names],
        [(choice and (choice.name, choice.options)) for choice in choices],
        [type(metric).__name__ for metric in (*state.train_metrics, *state.eval_metrics)],
        state.weights.dropout_generator.get_state().numpy().tobytes(),
    )


def outcome_of(engine, operation):
    """Run an operation; return its result or its error as a comparable value."""
    try:
        result = operation(engine)
    except (AdapterNotReady, InvalidComponentOptions) as error:
        return repr(error)
    if isinstance(result, dict):
        return {name: value for name, value in result.items() if name not in CLOCK_VALUES}
    if hasattr(result, 'logps'):
        return result.loss, result.metrics, [logps.tobytes() for logps in result.logps]
    return repr(result)


def random_operation(rng, make_feature):
    """Return a random operation as a function of the engine."""
    batch = [make_feature(rng.randint(3, 20), rng.randrange(99)) for _ in range(rng.randint(1, 3))]
    options = ForwardOptions(temperature=rng.choice((1.0, 0.8)))
    norm = rng.choice((0.1, 5.0))
    reduction = rng.choice(('sum', 'mean'))
    steps = rng.randint(1, 3)
    train = lambda engine: engine.forward_backward('a', batch, options=options)  # noqa: E731
    return rng.choice(
        [
            train, train, train,
            lambda engine: engine.forward_only('a', batch),
            lambda engine: engine.clip_grad_norm('a', max_grad_norm=norm),
            lambda engine: engine.clip_grad_norm('a', max_grad_value=0.01),
            lambda engine: engine.step('a'),
            lambda engine: engine.zero_grad('a'),
            lambda engine: engine.lr_step('a'),
            lambda engine: engine.clip_grad_and_step('a', max_grad_norm=norm),
            lambda engine: engine.clip_grad_and_step('a'),
            lambda engine: engine.calculate_metric('a'),
            lambda engine: engine.calculate_metric('a', is_training=False),
            lambda engine: engine.add_metric('a', 'Accuracy'),
            lambda engine: engine.set_loss('a', 'CrossEntropyLoss', reduction=reduction),
            lambda engine: engine.set_optimizer('a', 'SGD', lr=0.1, momentum=0.9),
            lambda engine: engine.set_lr_scheduler('a', 'OneCycleLR', max_lr=0.05, total_steps=5),
            lambda engine: engine.set_gradient_accumulation_steps('a', steps),
        ]
    )  # fmt: skip


@pytest.mark.parametrize('seed', range(8))
def test_restored_adapter_continues_bitwise(model, make_feature, seed):
    """A copy that is restored from a snapshot between random operations gives bitwise equal results afterwards."""
    rng = random.Random(seed)
    operations = [random_operation(rng, make_feature) for _ in range(12)]
    original = TrainerEngine(model)
    original.create_adapter('a', LoraConfig(r=4, lora_dropout=0.3, seed=seed), gradient_accumulation_steps=2)
    original.set_optimizer('a', 'AdamW', lr=1e-2)
    original.set_lr_scheduler('a', 'CosineWarmupScheduler', num_warmup_steps=1, num_training_steps=6)
    points, outcomes = [], []
    for operation in operations:
        points.append(original.snapshot('a'))
        outcomes.append(outcome_of(original, operation))
    for point in rng.sample(range(len(operations)), 4):
        restored = TrainerEngine(model)
        restored.restore_adapter('a', points[point])
        assert [outcome_of(restored, operation) for operation in operations[point:]] == outcomes[point:]
        assert state_of(restored) == state_of(original)


OPTIONS = {
    'AdamW8bit': None,
    'SGD': {'lr': 0.05, 'momentum': 0.9, 'nesterov': True},
    'AdamW': {'lr': 1e-2, 'amsgrad': True, 'betas': [0.8, 0.9]},
    'Adam': {'lr': 1e-2, 'groups': [{'pattern': 'lora_B', 'lr': 1e-1}]},
}
"""Options by optimizer. An optimizer that is absent, or has `None`, uses a learning rate of 0.01."""


@pytest.mark.parametrize('name', optimizer_names())
def test_every_optimizer_is_restored_bitwise(model, make_feature, name):
    """Every installed optimizer is restored bitwise, with a value head and an accumulated gradient."""
    engine = TrainerEngine(model)
    engine.create_adapter('a', LoraConfig(r=4, lora_dropout=0.1, seed=1, target_modules=('q_proj',)))
    options = OPTIONS.get(name, {'lr': 1e-2})
    try:
        engine.set_optimizer('a', name, **(options or {'lr': 1e-2}))
    except InvalidComponentOptions:
        pytest.skip(f'the library of {name} is not installed')
    engine.set_loss('a', 'PPOValueLoss')
    features = [
        [make_feature(9, seed, returns=[0.3] * 9, old_values=[0.1] * 9, advantages=[0.2] * 9)] for seed in range(6)
    ]
    for batch in features[:3]:
        engine.forward_backward('a', batch)
        engine.clip_grad_and_step('a')
    engine.forward_backward('a', features[3])
    restored = TrainerEngine(model)
    restored.restore_adapter('a', engine.snapshot('a'))
    for batch in features[4:]:
        for each in (engine, restored):
            each.forward_backward('a', batch)
            each.clip_grad_and_step('a')
        assert state_of(restored) == state_of(engine)
    assert float(restored.adapter('a').value_head.weight_1D.detach().abs().max()) > 0


SCHEDULES = {
    'ConstantLR': {}, 'ConstantWarmupScheduler': {'num_warmup_steps': 3}, 'CosineAnnealingLR': {'T_max': 4},
    'CosineAnnealingWarmRestarts': {'T_0': 2, 'T_mult': 2},
    'CosineWarmupScheduler': {'num_warmup_steps': 2, 'num_training_steps': 7},
    'CyclicLR': {'base_lr': 0.01, 'max_lr': 0.1, 'step_size_up': 2, 'mode': 'triangular2'},
    'ExponentialLR': {'gamma': 0.7}, 'LinearLR': {},
    'LinearWarmupScheduler': {'num_warmup_steps': 2, 'num_training_steps': 7},
    'MultiStepLR': {'milestones': [2, 4]}, 'OneCycleLR': {'max_lr': 0.1, 'total_steps': 12},
    'PolynomialLR': {'total_iters': 6}, 'StepLR': {'step_size': 2},
}  # fmt: skip


@pytest.mark.parametrize('name', scheduler_names())
def test_every_schedule_is_restored_bitwise(model, make_feature, name):
    """Every schedule is restored bitwise after 0, 2, 4 and 6 steps."""
    engine = TrainerEngine(model)
    engine.create_adapter('a', LoraConfig(r=2, seed=1, target_modules=('q_proj',)))
    engine.set_optimizer('a', 'SGD', lr=0.1, momentum=0.9)
    engine.set_lr_scheduler('a', name, **SCHEDULES[name])
    batch = [make_feature(9)]
    for _ in range(4):
        restored = TrainerEngine(model)
        restored.restore_adapter('a', engine.snapshot('a'))
        for each in (engine, restored):
            for _ in range(2):
                each.forward_backward('a', batch)
                each.clip_grad_and_step('a')
        assert state_of(restored) == state_of(engine)


def test_added_value_head_preserves_the_optimizer(model, make_feature):
    """A value head that is added later does not change the optimizer and schedule of the other weights."""
    engines = [TrainerEngine(model) for _ in range(2)]
    feature = make_feature(9, 1, returns=[0.3] * 9, old_values=[0.1] * 9)
    for engine in engines:
        engine.create_adapter('a', LoraConfig(r=4, seed=1))
        engine.set_optimizer('a', 'Muon', lr=1e-2)
        engine.set_lr_scheduler('a', 'LinearWarmupScheduler', num_warmup_steps=2, num_training_steps=9)
        for _ in range(3):
            engine.forward_backward('a', [make_feature(9, 2)])
            engine.clip_grad_and_step('a')
    engines[0].set_loss('a', 'PPOValueLoss')
    engines[0].set_loss('a', 'CrossEntropyLoss')
    for engine in engines:
        engine.forward_backward('a', [make_feature(9, 3)])
        engine.clip_grad_and_step('a')
    first, second = (engine.adapter('a') for engine in engines)
    assert first.learning_rate == second.learning_rate
    for own, other in zip(first.weights.parameters(), second.weights.parameters(), strict=True):
        assert own.detach().numpy().tobytes() == other.detach().numpy().tobytes()
    rates = {group['lr'] for group in first.optimizer.param_groups}
    assert rates == {second.learning_rate}
    engines[0].set_loss('a', 'PPOValueLoss')
    engines[0].forward_backward('a', [feature])
    engines[0].clip_grad_and_step('a')
    assert float(first.value_head.weight_1D.detach().abs().max()) > 0


def test_no_snapshot_while_a_forward_is_pending(engine, make_feature):
    """A snapshot is refused while a forward pass is pending."""
    assert engine.snapshot('a') is not None
    engine.forward('a', [make_feature()])
    assert engine.snapshot('a') is None
    engine.calculate_loss('a')
    assert engine.snapshot('a') is None
    engine.backward('a')
    assert engine.snapshot('a') is not None
    with pytest.raises(UnknownAdapter):
        engine.snapshot('ghost')


def test_invalid_snapshots_are_refused(engine, model, make_feature):
    """An id in use, incomplete snapshots, another rank and malformed tensors are refused and create no adapter."""
    engine.forward_backward('a', [make_feature()])
    whole = engine.snapshot('a')
    with pytest.raises(AdapterExists):
        engine.restore_adapter('a', whole)
    byte = TensorData('uint8', (1,), b'x')
    no_numbers, no_random_state = {**whole.trainer, STATE_TENSOR: byte}, {**whole.trainer, RANDOM_STATE: byte}
    broken = [
        engine.export_state('a', is_optimizer_included=False),
        engine.export_state('a', is_optimizer_included=True),
        AdapterSnapshot(LoraConfig(r=8), whole.adapter, whole.trainer, 0),
        AdapterSnapshot(whole.lora_config, whole.adapter, no_numbers, 0),
        AdapterSnapshot(whole.lora_config, whole.adapter, no_random_state, 0),
    ]
    for snapshot in broken:
        with pytest.raises(SnapshotMismatch):
            engine.restore_adapter('b', snapshot)
        assert engine.adapter_ids == ('a',)


def test_unregistered_loss_cannot_be_restored(engine, model):
    """A snapshot with an unregistered loss is refused at restoration, and the message names the loss."""
    engine.set_loss('a', lambda batch: {'loss': batch.logps_R.sum()})
    with pytest.raises(SnapshotMismatch, match='loss'):
        TrainerEngine(model).restore_adapter('a', engine.snapshot('a'))


def test_a_snapshot_is_a_copy(engine, model, make_feature):
    """Later operations of the adapter do not change a snapshot."""
    engine.forward_backward('a', [make_feature()])
    snapshot = engine.snapshot('a')
    before = state_of(engine)
    engine.clip_grad_and_step('a')
    engine.forward_backward('a', [make_feature(9, 9)])
    restored = TrainerEngine(model)
    restored.restore_adapter('a', snapshot)
    assert state_of(restored) == before
