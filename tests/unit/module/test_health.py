"""Tests of step health, compared with values computed by hand."""

import math

import pytest
import torch

from twinkle.data_format import LayerHealth, StepResult
from twinkle.module import measure_health

A, B = 'base_model.model.model.layers.0.q_proj.lora_A.weight', 'base_model.model.model.layers.0.q_proj.lora_B.weight'
OTHER = 'base_model.model.model.layers.1.q_proj.lora_A.weight'


def tensors(a, b, other):
    """Return tensors by name: A and B of one layer, and A of another layer."""
    return {A: torch.tensor(a), B: torch.tensor(b), OTHER: torch.tensor(other)}


BEFORE = tensors([[3.0, 0.0]], [[0.0], [4.0]], [[2.0, 0.0]])
GRADIENTS = tensors([[2.0, 4.0]], [[4.0], [0.0]], [[0.0, 0.0]])


def test_layer_norms_and_ratio():
    """Norms cover A and B of a layer, gradients are divided by `divisor`, and updates are relative to the weights."""
    after = tensors([[3.0, 3.0]], [[4.0], [4.0]], [[2.0, 0.0]])
    first, second = measure_health(GRADIENTS, BEFORE, after, divisor=2)
    assert (first.path, second.path) == ('model.layers.0.q_proj', 'model.layers.1.q_proj')
    assert (first.grad_norm, first.weight_norm, first.relative_update) == (3.0, 5.0, 1.0)
    assert (second.grad_norm, second.weight_norm, second.relative_update) == (0.0, 2.0, 0.0)
    assert first.non_finite_location == second.non_finite_location == ''


def test_gradient_without_step():
    """The relative update is 0 without an applied step, and a missing gradient counts as 0 in the norm."""
    (layer, _) = measure_health({**GRADIENTS, B: None}, BEFORE)
    assert layer.relative_update == 0.0
    assert layer.grad_norm == pytest.approx(math.sqrt(20))


@pytest.mark.parametrize('broken', [math.nan, math.inf, -math.inf])
def test_first_non_finite_element_is_reported(broken):
    """The first element that is not finite is reported with its tensor and index."""
    gradients = {name: tensor.clone() for name, tensor in GRADIENTS.items()}
    gradients[B][1, 0] = broken
    gradients[A][0, 1] = broken
    gradients[B][0, 0] = broken
    first, second = measure_health(gradients, BEFORE)
    assert first.non_finite_location == 'lora_A[0, 1] of the gradient'
    assert second.non_finite_location == ''
    assert not math.isfinite(first.grad_norm)


def test_non_finite_updated_weight_is_reported():
    """A weight that becomes NaN in the step is reported although the gradient is finite."""
    after = {**BEFORE, B: torch.tensor([[0.0], [math.nan]])}
    first, _ = measure_health(GRADIENTS, BEFORE, after)
    assert first.non_finite_location == 'lora_B[1, 0] of the updated weight'


def test_update_of_zero_weights_is_infinite():
    """The relative update of zero weights is infinite."""
    zero = {OTHER: torch.zeros(1, 2)}
    (layer,) = measure_health(zero, zero, {OTHER: torch.ones(1, 2)})
    assert layer.relative_update == math.inf


def test_norms_of_extreme_numbers_are_finite():
    """Norms of float32 values whose squares overflow or underflow are accurate."""
    huge = {OTHER: torch.full((1, 2), 3e38)}
    (layer,) = measure_health({OTHER: torch.full((1, 2), 1e-40)}, huge, huge)
    assert layer.weight_norm == pytest.approx(3e38 * math.sqrt(2), rel=1e-6)
    assert layer.grad_norm == pytest.approx(1e-40 * math.sqrt(2), rel=1e-3)


def test_parameters_without_lora_names():
    """Parameters without LoRA names are reported under their module's path."""
    weights = {'model.embed_tokens.weight': torch.ones(2, 2), 'model.norm.weight': torch.tensor([math.inf])}
    first, second = measure_health(dict.fromkeys(weights), weights)
    assert (first.path, second.path) == ('model.embed_tokens', 'model.norm')
    assert second.non_finite_location == 'weight[0] of the weight'


def test_former_names_of_health_fields_are_readable():
    """`StepResult.health` and `LayerHealth.update_to_weight_ratio` return the renamed fields."""
    layer = LayerHealth(path='q_proj', grad_norm=1.0, weight_norm=2.0, relative_update=0.5)
    result = StepResult(is_applied=True, learning_rate=0.1, step_count=1, layers=(layer,))
    assert (result.health, layer.update_to_weight_ratio) == ((layer,), 0.5)
