"""Health of a step, against numbers worked out by hand."""

import math

import pytest
import torch

from twinkle.data_format import LayerHealth, StepResult
from twinkle.module import measure_health

A, B = 'base_model.model.model.layers.0.q_proj.lora_A.weight', 'base_model.model.model.layers.0.q_proj.lora_B.weight'
OTHER = 'base_model.model.model.layers.1.q_proj.lora_A.weight'


def tensors(a, b, other):
    """Return tensors by name, A and B of one layer and A of another."""
    return {A: torch.tensor(a), B: torch.tensor(b), OTHER: torch.tensor(other)}


BEFORE = tensors([[3.0, 0.0]], [[0.0], [4.0]], [[2.0, 0.0]])
GRADIENTS = tensors([[2.0, 4.0]], [[4.0], [0.0]], [[0.0, 0.0]])


def test_norms_and_ratio_are_of_the_whole_layer():
    """A and B count together; gradients are divided, the change is set against the weights."""
    after = tensors([[3.0, 3.0]], [[4.0], [4.0]], [[2.0, 0.0]])
    first, second = measure_health(GRADIENTS, BEFORE, after, divisor=2)
    assert (first.path, second.path) == ('model.layers.0.q_proj', 'model.layers.1.q_proj')
    assert (first.grad_norm, first.weight_norm, first.relative_update) == (3.0, 5.0, 1.0)
    assert (second.grad_norm, second.weight_norm, second.relative_update) == (0.0, 2.0, 0.0)
    assert first.non_finite_location == second.non_finite_location == ''


def test_a_gradient_alone_can_be_measured():
    """Before a step is applied, or with no gradient yet, nothing changed."""
    (layer, _) = measure_health({**GRADIENTS, B: None}, BEFORE)
    assert layer.relative_update == 0.0
    assert layer.grad_norm == pytest.approx(math.sqrt(20))


@pytest.mark.parametrize('broken', [math.nan, math.inf, -math.inf])
def test_the_first_broken_element_is_named(broken):
    """Of the gradient first, with its index, even where several are broken."""
    gradients = {name: tensor.clone() for name, tensor in GRADIENTS.items()}
    gradients[B][1, 0] = broken
    gradients[A][0, 1] = broken
    gradients[B][0, 0] = broken
    first, second = measure_health(gradients, BEFORE)
    assert first.non_finite_location == 'lora_A[0, 1] of the gradient'
    assert second.non_finite_location == ''
    assert not math.isfinite(first.grad_norm)


def test_a_weight_that_the_step_broke_is_named():
    """The gradient was fine, the weight after the step is not."""
    after = {**BEFORE, B: torch.tensor([[0.0], [math.nan]])}
    first, _ = measure_health(GRADIENTS, BEFORE, after)
    assert first.non_finite_location == 'lora_B[1, 0] of the updated weight'


def test_zero_weights_that_grew_are_infinitely_updated():
    """Not a division by zero."""
    zero = {OTHER: torch.zeros(1, 2)}
    (layer,) = measure_health(zero, zero, {OTHER: torch.ones(1, 2)})
    assert layer.relative_update == math.inf


def test_norms_of_extreme_numbers_are_finite():
    """Squares of float32 values outside its range do not overflow or vanish."""
    huge = {OTHER: torch.full((1, 2), 3e38)}
    (layer,) = measure_health({OTHER: torch.full((1, 2), 1e-40)}, huge, huge)
    assert layer.weight_norm == pytest.approx(3e38 * math.sqrt(2), rel=1e-6)
    assert layer.grad_norm == pytest.approx(1e-40 * math.sqrt(2), rel=1e-3)


def test_parameters_of_a_whole_model_are_named_by_their_module():
    """Full-parameter training has no LoRA names."""
    weights = {'model.embed_tokens.weight': torch.ones(2, 2), 'model.norm.weight': torch.tensor([math.inf])}
    first, second = measure_health(dict.fromkeys(weights), weights)
    assert (first.path, second.path) == ('model.embed_tokens', 'model.norm')
    assert second.non_finite_location == 'weight[0] of the weight'


def test_former_names_of_health_fields_are_readable():
    """`StepResult.health` and `LayerHealth.update_to_weight_ratio` return the renamed fields."""
    layer = LayerHealth(path='q_proj', grad_norm=1.0, weight_norm=2.0, relative_update=0.5)
    result = StepResult(is_applied=True, learning_rate=0.1, step_count=1, layers=(layer,))
    assert (result.health, layer.update_to_weight_ratio) == ((layer,), 0.5)
