"""Tests of schedules: curves, refused options, and saving and restoring their state."""

import json
import math

import pytest
import torch

from twinkle.component import InvalidComponentOptions, UnknownComponent
from twinkle.module import (
    build_optimizer,
    build_scheduler,
    load_optimizer_state,
    load_scheduler_state,
    optimizer_state,
    scheduler_names,
    scheduler_state,
    steps_left,
)
from twinkle.module.optimizer_state import OptimizerState

STEPS = {'num_warmup_steps': 2, 'num_training_steps': 6}
OPTIONS = {
    'ConstantLR': {'factor': 0.5, 'total_iters': 3},
    'ConstantWarmupScheduler': {'num_warmup_steps': 3},
    'CosineAnnealingLR': {'T_max': 4, 'eta_min': 0.01},
    'CosineAnnealingWarmRestarts': {'T_0': 2, 'T_mult': 2},
    'CosineWarmupScheduler': STEPS,
    'CyclicLR': {'base_lr': 0.01, 'max_lr': 0.1, 'step_size_up': 2, 'mode': 'exp_range', 'gamma': 0.9},
    'ExponentialLR': {'gamma': 0.7},
    'LinearLR': {'total_iters': 4},
    'LinearWarmupScheduler': STEPS,
    'MultiStepLR': {'milestones': [2, 2, 5], 'gamma': 0.3},
    'OneCycleLR': {'max_lr': 0.1, 'total_steps': 12},
    'PolynomialLR': {'total_iters': 7, 'power': 2.0},
    'StepLR': {'step_size': 2, 'gamma': 0.3},
}
"""Options with which each schedule uses all its features within 12 steps."""


def rates(name, options, step_count):
    """Return the learning rate before each of the first steps of a schedule with base rate 1."""
    optimizer = build_optimizer('SGD', [torch.zeros(1, requires_grad=True)], {'lr': 1.0})
    scheduler = build_scheduler(name, optimizer, options)
    values = []
    for _ in range(step_count):
        values.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        scheduler.step()
    return values


def test_linear_warmup_rises_and_falls_in_straight_lines():
    """Linear warm-up rises from 0 to 1 in two steps, falls to 0 in four steps and stays there."""
    assert rates('LinearWarmupScheduler', STEPS, 8) == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0])


def test_cosine_warmup_falls_along_half_a_wave():
    """Cosine warm-up decays as (1 + cos) / 2; integers may be given as floats."""
    wave = [0.5 * (1 + math.cos(math.pi * quarter / 4)) for quarter in range(5)]
    options = {name: float(value) for name, value in STEPS.items()}
    assert rates('CosineWarmupScheduler', options, 8) == pytest.approx([0, 0.5, *wave, 0])


@pytest.mark.parametrize('name', ['LambdaLR', 'ReduceLROnPlateau', 'LRScheduler', 'Nothing'])
def test_unsupported_schedules_are_unknown(name):
    """Schedules that need a function or a measured value, base classes and unknown names are refused."""
    optimizer = build_optimizer('SGD', [torch.zeros(1, requires_grad=True)], {})
    assert name not in scheduler_names()
    with pytest.raises(UnknownComponent):
        build_scheduler(name, optimizer, {})


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        ('LinearWarmupScheduler', {'num_warmup_steps': -1, 'num_training_steps': 6}),
        ('LinearWarmupScheduler', {'num_warmup_steps': 1, 'num_training_steps': 0}),
        ('CosineWarmupScheduler', {'num_warmup_steps': 1}),
        ('StepLR', {'step_size': 2, 'gama': 0.5}),
        ('StepLR', {'step_size': 2, 'optimizer': 1}),
        ('StepLR', {'step_size': 0}),
        ('CosineAnnealingLR', {'T_max': 0}),
        ('StepLR', {'step_size': 0.5}),
        ('StepLR', {'step_size': -1}),
        ('MultiStepLR', {'milestones': 'ab'}),
        ('MultiStepLR', {'milestones': [0.5, 2]}),
        ('LinearWarmupScheduler', {'num_warmup_steps': 0.5, 'num_training_steps': 6}),
        ('LinearWarmupScheduler', {'num_warmup_steps': 1, 'num_training_steps': math.nan}),
        ('ExponentialLR', {'gamma': 1e308}),
        ('CosineWarmupScheduler', {**STEPS, 'num_cycles': 'many'}),
        ('CosineWarmupScheduler', {**STEPS, 'num_cycles': math.inf}),
        ('StepLR', {'step_size': 5, 'gamma': 'x'}),
        ('MultiStepLR', {'milestones': [5], 'gamma': math.nan}),
        ('PolynomialLR', {'total_iters': 5, 'power': -1.0}),
        ('OneCycleLR', {'max_lr': 'high', 'total_steps': 5}),
        ('OneCycleLR', {'max_lr': 0.1, 'total_steps': 5, 'anneal_strategy': 'steep'}),
    ],
)
def test_bad_options_are_refused(name, options):
    """Missing, unknown and invalid options are refused."""
    optimizer = build_optimizer('SGD', [torch.zeros(1, requires_grad=True)], {'lr': 10.0})
    with pytest.raises(InvalidComponentOptions):
        build_scheduler(name, optimizer, options)


def build_run(name):
    """Return two parameters in groups with different rates, their optimizer and its schedule."""
    parameters = {name: torch.full((2, 3), 1.0, requires_grad=True) for name in ('a.lora_A', 'a.lora_B')}
    groups = [{'pattern': 'lora_B', 'lr': 0.05}]
    optimizer = build_optimizer('AdamW', parameters, {'lr': 0.003, 'groups': groups})
    return parameters, optimizer, build_scheduler(name, optimizer, OPTIONS[name])


def run_steps(parameters, optimizer, scheduler, step_count):
    """Step the optimizer and the schedule; return the learning rate and first beta of every group at each step."""
    rates = []
    for index in range(step_count):
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, 0.5 + index)
        optimizer.step()
        rates.append([(group['lr'], group['betas'][0]) for group in optimizer.param_groups])
        scheduler.step()
    return rates


@pytest.mark.parametrize('name', scheduler_names())
@pytest.mark.parametrize('before', [1, 3, 6])
def test_every_schedule_is_restored_bitwise_from_json(name, before):
    """A schedule that is restored from JSON after 1, 3 or 6 steps gives bitwise the same rates and weights."""
    parameters, optimizer, scheduler = build_run(name)
    run_steps(parameters, optimizer, scheduler, before)
    saved = optimizer_state(optimizer)
    numbers = json.loads(json.dumps([scheduler_state(scheduler), saved.numbers], allow_nan=False))
    tensors = {key: tensor.clone() for key, tensor in saved.tensors.items()}
    others, new_optimizer, new_scheduler = build_run(name)
    with torch.no_grad():
        for path, parameter in parameters.items():
            others[path].copy_(parameter)
    new_optimizer.step()  # without gradients; torch warns if a schedule is stepped before its optimizer
    load_scheduler_state(new_scheduler, numbers[0])
    load_optimizer_state(new_optimizer, OptimizerState(tensors, numbers[1]))
    assert run_steps(others, new_optimizer, new_scheduler, 5) == run_steps(parameters, optimizer, scheduler, 5)
    assert all(torch.equal(others[path], parameter) for path, parameter in parameters.items())
    assert scheduler_state(new_scheduler) == scheduler_state(scheduler)


def test_the_state_of_another_schedule_is_refused():
    """The state of another schedule, or a malformed state, is refused and changes nothing."""
    *_, step = build_run('StepLR')
    *_, cosine = build_run('CosineAnnealingLR')
    before = scheduler_state(step)
    for invalid_state in (scheduler_state(cosine), {**before, 'gamma': 'fast'}, {}):
        with pytest.raises(ValueError, match='StepLR'):
            load_scheduler_state(step, invalid_state)
    assert scheduler_state(step) == before


@pytest.mark.parametrize('name', scheduler_names())
def test_steps_left_counts_down_to_the_step_torch_refuses(name):
    """`steps_left` counts down to the step at which torch raises; schedules without an end have no value."""
    parameters, optimizer, scheduler = build_run(name)
    for _ in range(40):
        remaining = steps_left(scheduler)
        if remaining == 0:
            with pytest.raises(ValueError, match='steps'):
                run_steps(parameters, optimizer, scheduler, 1)
            return
        run_steps(parameters, optimizer, scheduler, 1)
        assert steps_left(scheduler) == (None if remaining is None else remaining - 1)
    assert remaining is None


def test_constant_warmup_rises_and_stays():
    """Constant warm-up rises from 0 to 1 in two steps and stays there."""
    assert rates('ConstantWarmupScheduler', {'num_warmup_steps': 2}, 5) == pytest.approx([0, 0.5, 1, 1, 1])


def test_each_group_follows_its_own_rate():
    """A schedule scales the rate of each group separately."""
    _, optimizer, scheduler = build_run('LinearWarmupScheduler')
    optimizer.step()
    scheduler.step()
    assert [group['lr'] for group in optimizer.param_groups] == pytest.approx([0.0015, 0.025])


def test_every_group_is_validated():
    """A schedule is refused if only its second group has an invalid rate."""
    parameters = {name: torch.zeros(1, requires_grad=True) for name in ('a', 'b')}
    optimizer = build_optimizer('SGD', parameters, {'lr': 1e-5, 'groups': [{'pattern': 'b', 'lr': 10.0}]})
    with pytest.raises(InvalidComponentOptions):
        build_scheduler('ExponentialLR', optimizer, {'gamma': 1e308})


def test_scheduler_class_accepts_functions():
    """A scheduler class may take functions as options."""
    optimizer = build_optimizer('SGD', [torch.zeros(1, requires_grad=True)], {'lr': 1.0})
    build_scheduler(torch.optim.lr_scheduler.LambdaLR, optimizer, {'lr_lambda': lambda _: 0.5})
    assert optimizer.param_groups[0]['lr'] == 0.5
