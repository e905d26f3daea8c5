"""Optimizers and schedules by name."""

import math

import pytest
import torch

from twinkle.component import InvalidComponentOptions, UnknownComponent
from twinkle.module import build_optimizer, build_scheduler, optimizer_names, scheduler_names

STEPS = {'num_warmup_steps': 2, 'num_training_steps': 6}


def rates(name, options, moves):
    """Return the rate before each of `moves` moves of a schedule over rate 1."""
    optimizer = build_optimizer('SGD', [torch.zeros(1, requires_grad=True)], {'lr': 1.0})
    scheduler = build_scheduler(name, optimizer, options)
    values = []
    for _ in range(moves):
        values.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        scheduler.step()
    return values


def test_linear_warmup_rises_and_falls_in_straight_lines():
    """0 to 1 in two moves, to 0 in the four after them, and stays there."""
    assert rates('LinearWarmupScheduler', STEPS, 8) == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0])


def test_cosine_warmup_falls_along_half_a_wave():
    """After the warm-up the rate follows (1 + cos) / 2, and whole numbers may come as floats."""
    wave = [0.5 * (1 + math.cos(math.pi * quarter / 4)) for quarter in range(5)]
    options = {name: float(value) for name, value in STEPS.items()}
    assert rates('CosineWarmupScheduler', options, 8) == pytest.approx([0, 0.5, *wave, 0])


@pytest.mark.parametrize('name', optimizer_names())
def test_every_optimizer_steps(name):
    """Each name gives an optimizer that changes its parameters."""
    parameter = torch.ones(3, 2, requires_grad=True)
    optimizer = build_optimizer(name, [parameter], {'lr': 0.1})
    for _ in range(2):
        parameter.grad = torch.ones(3, 2)
        optimizer.step()
    assert not torch.equal(parameter, torch.ones(3, 2))


def test_lists_become_tuples():
    """What came over a wire as a list is what torch takes."""
    optimizer = build_optimizer('AdamW', [torch.zeros(1, requires_grad=True)], {'betas': [0.5, 0.6]})
    assert optimizer.param_groups[0]['betas'] == (0.5, 0.6)


@pytest.mark.parametrize('name', ['LambdaLR', 'ReduceLROnPlateau', 'LRScheduler', 'Nothing'])
def test_schedules_that_need_more_than_numbers_are_unknown(name):
    """They could not be built from a message, saved or resumed."""
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
    ],
)
def test_bad_options_are_refused(name, options):
    """Missing, unknown and senseless options."""
    optimizer = build_optimizer('SGD', [torch.zeros(1, requires_grad=True)], {'lr': 10.0})
    with pytest.raises(InvalidComponentOptions):
        build_scheduler(name, optimizer, options)


@pytest.mark.parametrize(
    'options',
    [
        {'betas': [0.9]},
        {'betas': 0.9},
        {'lr': 'fast'},
        {'lr': 1e308},
        {'params': [1]},
        {'differentiable': True},
        {'capturable': True},
        {'weight_decay': 1e300},
    ],
)
def test_bad_options_of_optimizers_are_refused(options):
    """Whatever torch raises for them, even if only at a step, is one kind of refusal at once."""
    with pytest.raises(InvalidComponentOptions):
        build_optimizer('AdamW', [torch.zeros(1, requires_grad=True)], options)


@pytest.mark.parametrize('name', ['LBFGS', 'Optimizer', 'AdamX'])
def test_optimizers_that_cannot_be_driven_are_unknown(name):
    """The refusal says what there is."""
    with pytest.raises(UnknownComponent) as refusal:
        build_optimizer(name, [torch.zeros(1, requires_grad=True)], {})
    assert 'AdamW' in refusal.value.known
