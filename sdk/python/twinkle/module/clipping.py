"""Clipping a gradient that is kept as a sum: by its norm, or element by element.

The gradient is a list of tensors, scaled in place; `divisor` is what the sum is divided by at the step. Every
number that a caller may give is checked before a tensor is touched.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from twinkle.errors import error_class

_TINY = 1e-6
"""Added to the norm before it divides, as torch's own clipping does."""
_SMALL, _LARGE = 1e-12, 1e18


@error_class('the norm of the gradient is {norm}, so the gradient cannot be scaled')
class GradientNotFinite(ValueError):
    """A gradient has no finite norm; nothing was changed."""

    norm: float


def gradient_norm(gradients: Sequence[Tensor], *, norm_type: float = 2.0, divisor: int = 1) -> float:
    """Return the norm of all elements together, divided; 0.0 where there are none.

    Args:
        gradients: of one device; only read.
        norm_type: the p of the p-norm, from 1 on; infinity gives the largest magnitude.
        divisor: what the gradients are a sum of, at least 1.

    Raises:
        ValueError: the norm type or divisor is out of range.
    """
    check_norm_type(norm_type)
    if divisor < 1:
        raise ValueError(f'divisor must be at least 1, got {divisor}')
    return _norm(gradients, norm_type) / divisor if gradients else 0.0


def clip_by_norm(gradients: Sequence[Tensor], *, max_norm: float, norm_type: float = 2.0, divisor: int = 1) -> float:
    """Scale the gradients so that their divided norm is at most `max_norm`; return the divided norm before.

    A gradient within the limit keeps every bit.

    Args:
        gradients: of one device; scaled in place.
        max_norm: from 0 on; infinity measures and never scales.
        norm_type: see `gradient_norm`.
        divisor: see `gradient_norm`.

    Raises:
        ValueError: a number is out of range.
        GradientNotFinite: an element is infinite or not a number.
    """
    _check_limit('max_norm', max_norm)
    norm = gradient_norm(gradients, norm_type=norm_type, divisor=divisor)
    if not math.isfinite(norm):
        raise GradientNotFinite(norm)
    factor = max_norm / (norm + _TINY)
    if factor < 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm


def clip_by_value(gradients: Sequence[Tensor], *, max_value: float, divisor: int = 1) -> float:
    """Move each divided element into `[-max_value, max_value]`; return the largest divided magnitude before.

    Raises:
        ValueError: a number is out of range.
        GradientNotFinite: an element is infinite or not a number.
    """
    _check_limit('max_value', max_value)
    largest = gradient_norm(gradients, norm_type=math.inf, divisor=divisor)
    if not math.isfinite(largest):
        raise GradientNotFinite(largest)
    if largest > max_value:
        for gradient in gradients:
            gradient.clamp_(-max_value * divisor, max_value * divisor)
    return largest


def check_norm_type(norm_type: float) -> None:
    """Refuse what is no norm.

    Raises:
        ValueError: the type is below 1, where the triangle inequality fails and its root overflows, or no number.
    """
    if not norm_type >= 1.0:
        raise ValueError(f'norm_type must be a number from 1 on, or infinity, got {norm_type}')


def _check_limit(name: str, limit: float) -> None:
    if not limit >= 0.0:
        raise ValueError(f'{name} must be a number from 0 on, got {limit}')


def _norm(gradients: Sequence[Tensor], norm_type: float) -> float:
    norm = float(torch.nn.utils.get_total_norm(gradients, norm_type=norm_type))
    # Between these no power up to a square can overflow, nor vanish and still count: one answer of the device will do.
    if math.isinf(norm_type) or (norm_type <= 2.0 and _SMALL < norm < _LARGE):
        return norm
    largest = float(torch.nn.utils.get_total_norm(gradients, norm_type=math.inf))
    if not math.isfinite(largest) or largest == 0.0 or (math.isfinite(norm) and norm >= largest):
        return norm if largest else 0.0
    # Take the powers of numbers whose largest is 1.
    return largest * float(torch.nn.utils.get_total_norm([item / largest for item in gradients], norm_type=norm_type))
