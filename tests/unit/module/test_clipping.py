"""Clipping against torch's own, at the limits, and with numbers that would break powers."""

import math

import pytest
import torch

from twinkle.module import GradientNotFinite, clip_by_norm, clip_by_value, gradient_norm


def gradients(scale=1.0, seed=0):
    """Return three tensors."""
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for shape in ((3, 4), (5,), (2, 2))]


@pytest.mark.parametrize('norm_type', [1.0, 1.5, 2.0, 3.0, math.inf])
@pytest.mark.parametrize('max_norm', [0.0, 0.1, 2.0, 100.0, math.inf])
def test_clipping_by_norm_is_torchs(norm_type, max_norm):
    """The norm and the scaled gradient, for finite norms and the infinite one."""
    own, parameters = gradients(), [torch.nn.Parameter(torch.zeros_like(item)) for item in gradients()]
    for parameter, gradient in zip(parameters, gradients(), strict=True):
        parameter.grad = gradient
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
    norm = clip_by_norm(own, max_norm=max_norm, norm_type=norm_type)
    assert norm == pytest.approx(float(expected), rel=1e-6)
    for gradient, parameter in zip(own, parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=0)


def test_a_gradient_within_the_limit_keeps_every_bit():
    """Nothing is multiplied by a factor that rounds."""
    own = gradients()
    clip_by_norm(own, max_norm=gradient_norm(own) * 1.001)
    clip_by_value(own, max_value=gradient_norm(own, norm_type=math.inf))
    assert all(torch.equal(one, other) for one, other in zip(own, gradients(), strict=True))


@pytest.mark.parametrize('divisor', [1, 7])
def test_the_limit_holds_for_the_divided_gradient(divisor):
    """The sum may be larger by the divisor; the norm is reported divided."""
    own = gradients()
    before = gradient_norm(gradients()) / divisor
    assert clip_by_norm(own, max_norm=0.01, divisor=divisor) == pytest.approx(before)
    assert gradient_norm(own, divisor=divisor) == pytest.approx(0.01, rel=1e-3)
    own = gradients()
    largest = max(float(item.abs().max()) for item in own) / divisor
    assert clip_by_value(own, max_value=0.01, divisor=divisor) == pytest.approx(largest)
    assert max(float(item.abs().max()) for item in own) == pytest.approx(0.01 * divisor)


def test_clipping_by_value_leaves_small_elements_alone():
    """Only what lies outside moves, to the limit of its own sign."""
    own = [torch.tensor([-3.0, -0.5, 0.0, 0.25, 9.0])]
    assert clip_by_value(own, max_value=0.5) == 9.0
    assert own[0].tolist() == [-0.5, -0.5, 0.0, 0.25, 0.5]


@pytest.mark.parametrize('scale', [1e-38, 1e-30, 1e30])
@pytest.mark.parametrize('norm_type', [2.0, 3.0, 50.0])
def test_powers_that_overflow_or_vanish_do_not_spoil_the_norm(scale, norm_type):
    """The norm of huge and of tiny gradients, against float64."""
    own = gradients(scale)
    flat = torch.cat([item.reshape(-1).double() for item in own]) / scale
    expected = scale * float((flat.abs() ** norm_type).sum() ** (1 / norm_type))
    assert clip_by_norm(own, max_norm=1e-3 * scale, norm_type=norm_type) == pytest.approx(expected, rel=1e-4)
    assert all(bool(item.isfinite().all()) for item in own)
    if scale > 1:
        assert gradient_norm(own, norm_type=norm_type) == pytest.approx(1e-3 * scale, rel=1e-3)


@pytest.mark.parametrize('norm_type', [0.0, 0.5, -1.0, 5e-324, 1e-310, math.nan, -math.inf])
def test_what_is_no_norm_is_refused(norm_type):
    """The smallest positive numbers too, whose inverse is infinite; no element changes."""
    own = gradients()
    with pytest.raises(ValueError, match='norm_type'):
        clip_by_norm(own, max_norm=0.1, norm_type=norm_type)
    assert all(torch.equal(one, other) for one, other in zip(own, gradients(), strict=True))


@pytest.mark.parametrize('limit', [-1.0, math.nan, -math.inf])
def test_limits_that_are_none_are_refused(limit):
    """Negative ones and what is no number."""
    with pytest.raises(ValueError, match='max_norm'):
        clip_by_norm(gradients(), max_norm=limit)
    with pytest.raises(ValueError, match='max_value'):
        clip_by_value(gradients(), max_value=limit)


@pytest.mark.parametrize('broken', [math.nan, math.inf])
def test_a_broken_gradient_is_refused_and_left_as_it_is(broken):
    """One infinite element would otherwise turn all others to zero, or to no numbers."""
    own = gradients()
    own[1][2] = broken
    for clip in (lambda: clip_by_norm(own, max_norm=1.0), lambda: clip_by_value(own, max_value=1.0)):
        with pytest.raises(GradientNotFinite):
            clip()
    assert torch.equal(own[0], gradients()[0])


def test_nothing_has_norm_zero():
    """No tensors, and tensors of zeros."""
    assert clip_by_norm([], max_norm=1.0) == 0.0
    zeros = [torch.zeros(3)]
    assert clip_by_norm(zeros, max_norm=0.0) == 0.0
    assert zeros[0].tolist() == [0, 0, 0]
