"""Tests of clipping: comparison with torch, extreme values, and refused arguments."""

import math

import pytest
import torch

from twinkle.module import GradientNotFinite, clip_by_norm, clip_by_value, gradient_norm


def gradients(scale=1.0, seed=0):
    """Return three random tensors."""
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for shape in ((3, 4), (5,), (2, 2))]


@pytest.mark.parametrize('norm_type', [1.0, 1.5, 2.0, 3.0, math.inf])
@pytest.mark.parametrize('max_norm', [0.0, 0.1, 2.0, 100.0, math.inf])
def test_clipping_by_norm_equals_that_of_torch(norm_type, max_norm):
    """Norm and scaled gradient equal torch's for finite norm types and the infinity norm."""
    clipped, parameters = gradients(), [torch.nn.Parameter(torch.zeros_like(item)) for item in gradients()]
    for parameter, gradient in zip(parameters, gradients(), strict=True):
        parameter.grad = gradient
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
    norm = clip_by_norm(clipped, max_norm=max_norm, norm_type=norm_type)
    assert norm == pytest.approx(float(expected), rel=1e-6)
    for gradient, parameter in zip(clipped, parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=0)


def test_a_gradient_within_the_limit_is_unchanged():
    """A gradient within the limit is bitwise unchanged."""
    clipped = gradients()
    clip_by_norm(clipped, max_norm=gradient_norm(clipped) * 1.001)
    clip_by_value(clipped, max_value=gradient_norm(clipped, norm_type=math.inf))
    assert all(torch.equal(one, other) for one, other in zip(clipped, gradients(), strict=True))


@pytest.mark.parametrize('divisor', [1, 7])
def test_the_limit_holds_for_the_divided_gradient(divisor):
    """The limit and the returned norm apply to the gradient after division by `divisor`."""
    clipped = gradients()
    before = gradient_norm(gradients()) / divisor
    assert clip_by_norm(clipped, max_norm=0.01, divisor=divisor) == pytest.approx(before)
    assert gradient_norm(clipped, divisor=divisor) == pytest.approx(0.01, rel=1e-3)
    clipped = gradients()
    largest = max(float(item.abs().max()) for item in clipped) / divisor
    assert clip_by_value(clipped, max_value=0.01, divisor=divisor) == pytest.approx(largest)
    assert max(float(item.abs().max()) for item in clipped) == pytest.approx(0.01 * divisor)


def test_clipping_by_value_does_not_change_small_elements():
    """Only elements outside the limit are clamped, and they keep their sign."""
    clipped = [torch.tensor([-3.0, -0.5, 0.0, 0.25, 9.0])]
    assert clip_by_value(clipped, max_value=0.5) == 9.0
    assert clipped[0].tolist() == [-0.5, -0.5, 0.0, 0.25, 0.5]


@pytest.mark.parametrize('scale', [1e-38, 1e-30, 1e30])
@pytest.mark.parametrize('norm_type', [2.0, 3.0, 50.0])
def test_norms_of_extreme_gradients_are_accurate(scale, norm_type):
    """Norms of very large and very small gradients equal those computed in float64."""
    clipped = gradients(scale)
    flat = torch.cat([item.reshape(-1).double() for item in clipped]) / scale
    expected = scale * float((flat.abs() ** norm_type).sum() ** (1 / norm_type))
    assert clip_by_norm(clipped, max_norm=1e-3 * scale, norm_type=norm_type) == pytest.approx(expected, rel=1e-4)
    assert all(bool(item.isfinite().all()) for item in clipped)
    if scale > 1:
        assert gradient_norm(clipped, norm_type=norm_type) == pytest.approx(1e-3 * scale, rel=1e-3)


@pytest.mark.parametrize('norm_type', [0.0, 0.5, -1.0, 5e-324, 1e-310, math.nan, -math.inf])
def test_invalid_norm_types_are_refused(norm_type):
    """Norm types below 1, NaN and negative infinity are refused, and no element changes."""
    clipped = gradients()
    with pytest.raises(ValueError, match='norm_type'):
        clip_by_norm(clipped, max_norm=0.1, norm_type=norm_type)
    assert all(torch.equal(one, other) for one, other in zip(clipped, gradients(), strict=True))


@pytest.mark.parametrize('limit', [-1.0, math.nan, -math.inf])
def test_invalid_limits_are_refused(limit):
    """Negative limits and NaN are refused."""
    with pytest.raises(ValueError, match='max_norm'):
        clip_by_norm(gradients(), max_norm=limit)
    with pytest.raises(ValueError, match='max_value'):
        clip_by_value(gradients(), max_value=limit)


@pytest.mark.parametrize('broken', [math.nan, math.inf])
def test_non_finite_gradient_is_refused(broken):
    """A gradient with an infinite or NaN element is refused and not scaled."""
    clipped = gradients()
    clipped[1][2] = broken
    for clip in (lambda: clip_by_norm(clipped, max_norm=1.0), lambda: clip_by_value(clipped, max_value=1.0)):
        with pytest.raises(GradientNotFinite):
            clip()
    assert torch.equal(clipped[0], gradients()[0])


def test_empty_gradient_has_norm_zero():
    """An empty list and tensors of zeros have norm 0 and are unchanged."""
    assert clip_by_norm([], max_norm=1.0) == 0.0
    zeros = [torch.zeros(3)]
    assert clip_by_norm(zeros, max_norm=0.0) == 0.0
    assert zeros[0].tolist() == [0, 0, 0]
