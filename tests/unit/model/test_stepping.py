"""Tests of clipping, of layer health, and of steps that are refused before any change."""

import math

import pytest
import torch

from twinkle.data_format import LoraConfig
from twinkle.model.engine import TrainerEngine
from twinkle.model.errors import AdapterNotReady, InvalidArgument


def gradients_of(engine):
    """Return copies of the accumulated gradient."""
    return [parameter.grad.clone() for parameter in engine.adapter('a').parameters()]


def snapshot_of(engine):
    """Return weights, gradient, counters, learning rate, gradient norm and schedule position."""
    state = engine.adapter('a')
    tensors = [item.numpy(force=True).tobytes() for item in state.parameters()]
    gradients = [None if item.grad is None else item.grad.numpy().tobytes() for item in state.parameters()]
    counted = None if state.scheduler is None else state.scheduler.last_epoch
    return tensors, gradients, state.step_count, state.batch_count, state.learning_rate, state.grad_norm, counted


@pytest.fixture
def ready(engine, make_feature):
    """Trainer whose adapter has a gradient and nonzero LoRA matrices B."""
    engine.set_optimizer('a', 'AdamW', lr=1e-2)
    for seed in range(2):
        engine.forward_backward('a', [make_feature(20, seed)])
        if not seed:
            engine.clip_grad_and_step('a')
    return engine


def test_clipping_by_value_limits_each_element_of_the_divided_gradient(ready):
    """Elements beyond the limit are clamped, others are unchanged, and the norm is computed after the clamping."""
    before, divisor = gradients_of(ready), ready.adapter('a').divisor
    limit = float(torch.cat([item.flatten() for item in before]).abs().median()) / divisor
    norm = ready.clip_grad_norm('a', max_grad_norm=math.inf, max_grad_value=limit)
    expected = [item.clamp(-limit * divisor, limit * divisor) for item in before]
    for own, other in zip(gradients_of(ready), expected, strict=True):
        torch.testing.assert_close(own, other, atol=0, rtol=1e-6)
    total = math.sqrt(sum(float((item / divisor).double().square().sum()) for item in expected))
    assert norm == pytest.approx(total, rel=1e-5)
    assert ready.clip_grad_norm('a', max_grad_norm=norm / 2) == pytest.approx(norm, rel=1e-6)
    assert ready.clip_grad_norm('a', max_grad_norm=math.inf) == pytest.approx(norm / 2, rel=1e-4)


@pytest.mark.parametrize(
    'limits', [{'max_grad_norm': 0.0}, {'max_grad_norm': math.nan}, {'norm_type': 0.5}, {'max_grad_value': 0.0}]
)
def test_invalid_limits_are_refused(ready, limits):
    """Both clipping methods refuse invalid limits, and change nothing."""
    before = snapshot_of(ready)
    for verb in (ready.clip_grad_norm, ready.clip_grad_and_step):
        with pytest.raises(InvalidArgument):
            verb('a', **limits)
    assert snapshot_of(ready) == before


def test_health_is_measured_layer_by_layer(ready):
    """Health has per layer the unclipped gradient's norm, the earlier weights' norm and the relative update."""
    before = {name: item.detach().clone() for name, item in ready.adapter('a').named_parameters().items()}
    gradients, divisor = dict(zip(before, gradients_of(ready), strict=True)), ready.adapter('a').divisor
    health = ready.clip_grad_and_step('a', max_grad_norm=1e-3, is_health_returned=True).layers
    after = ready.adapter('a').named_parameters()
    assert [layer.path for layer in health] == list(ready.model.layers)
    for layer in health:
        own = [name for name in before if f'.{layer.path}.' in name]
        norm = lambda tensors: math.sqrt(sum(float(item.double().square().sum()) for item in tensors))  # noqa: E731
        weight = norm([before[name] for name in own])
        change = norm([after[name].detach() - before[name] for name in own])
        assert layer.grad_norm == pytest.approx(norm([gradients[name] for name in own]) / divisor, rel=1e-5)
        assert layer.weight_norm == pytest.approx(weight, rel=1e-6)
        assert layer.relative_update == pytest.approx(change / weight, rel=1e-4)
        assert layer.non_finite_location == ''


def test_health_is_measured_on_request(ready):
    """Health is measured only if the step requests it."""
    assert ready.step('a').layers == ()
    assert len(ready.step('a', is_health_returned=True).layers) == len(ready.model.layers)


def test_a_step_after_the_end_of_its_schedule_is_refused(ready, make_feature):
    """If the schedule has no steps left, a step is refused without changes; with a new schedule, the step succeeds."""
    ready.set_lr_scheduler('a', 'OneCycleLR', max_lr=0.1, total_steps=2)
    for _ in range(2):
        ready.clip_grad_and_step('a')
        ready.forward_backward('a', [make_feature(9)])
    before = snapshot_of(ready)
    with pytest.raises(AdapterNotReady, match='steps left'):
        ready.clip_grad_and_step('a', max_grad_norm=1e-3)
    with pytest.raises(AdapterNotReady, match='steps left'):
        ready.lr_step('a')
    assert snapshot_of(ready) == before
    ready.set_lr_scheduler('a', 'StepLR', step_size=1)
    assert ready.clip_grad_and_step('a').is_applied


def test_a_schedule_that_overflows_is_refused_before_the_step(ready):
    """A step is refused if the schedule's next learning rate overflows."""
    ready.set_optimizer('a', 'SGD', lr=0.1, momentum=0.9)
    ready.set_lr_scheduler('a', 'CyclicLR', base_lr=0.1, max_lr=0.2, step_size_up=1, mode='exp_range', gamma=1e200)
    ready.lr_step('a')
    before = snapshot_of(ready)
    with pytest.raises(AdapterNotReady):
        ready.clip_grad_and_step('a')
    assert snapshot_of(ready) == before


def test_checking_the_schedule_does_not_advance_it(ready, make_feature):
    """Checking the schedule's remaining steps does not change its learning rates and momenta."""
    ready.set_optimizer('a', 'SGD', lr=0.1, momentum=0.9)
    ready.set_lr_scheduler('a', 'OneCycleLR', max_lr=0.1, total_steps=6)
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=0.1, total_steps=6)
    for _ in range(5):
        ready.forward_backward('a', [make_feature(9)])
        ready.clip_grad_and_step('a')
        plain.step()
        schedule.step()
        own = ready.adapter('a').optimizer.param_groups[0]
        assert (own['lr'], own['momentum']) == (plain.param_groups[0]['lr'], plain.param_groups[0]['momentum'])


def test_a_step_with_too_few_batches_is_not_applied(model, make_feature):
    """A step with too few accumulated batches is not applied and keeps the gradient."""
    engine = TrainerEngine(model)
    engine.create_adapter('a', LoraConfig(r=2, seed=1), gradient_accumulation_steps=2)
    engine.forward_backward('a', [make_feature(9)])
    before = snapshot_of(engine)
    assert not engine.clip_grad_and_step('a').is_applied
    assert snapshot_of(engine) == before
    engine.forward_backward('a', [make_feature(9)])
    assert engine.clip_grad_and_step('a').is_applied


def test_a_sum_of_gradients_that_overflows_adds_nothing(engine, make_feature):
    """A gradient whose sum with the accumulated gradient overflows is refused, and the accumulated one is unchanged."""
    engine.set_loss('a', lambda batch: {'loss': batch.logps_R.sum() * 1e36})
    engine.forward_backward('a', [make_feature(8)])
    for parameter in engine.adapter('a').parameters():
        parameter.grad.mul_(3.402e38 / float(parameter.grad.abs().max() or 1.0))
    before = snapshot_of(engine)
    with pytest.raises(ArithmeticError):
        engine.forward_backward('a', [make_feature(8)])
    assert snapshot_of(engine) == before
