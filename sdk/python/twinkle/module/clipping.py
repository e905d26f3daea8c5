"""Clipping of summed gradients, by norm or by value.

A gradient is a list of tensors that contain a sum. The sum divided by `divisor` is the gradient that a step applies.
The tensors are changed in place, after all arguments were validated.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from twinkle.errors import error_class

_TINY = 1e-6
"""Added to the norm in the denominator, as in torch's clipping."""
_SMALL, _LARGE = 1e-12, 1e18
"""Range of norms in which powers up to 2 of float32 elements are accurate enough."""


@error_class('the norm of the gradient is {norm}, so the gradient cannot be scaled')
class GradientNotFinite(ValueError):
    """A gradient has no finite norm; nothing was changed."""

    norm: float


def gradient_norm(gradients: Sequence[Tensor], *, norm_type: float = 2.0, divisor: int = 1) -> float:
    """Return the norm over all elements of the divided gradient; 0.0 without gradients.

    Args:
        gradients: tensors on one device, or shards of this rank (`DTensor`). They are not modified. With shards, every
            rank must make the same call.
        norm_type: p of the p-norm, at least 1; infinity is the largest magnitude.
        divisor: divisor of the gradients, at least 1.

    Raises:
        ValueError: the norm type or the divisor is out of range.
    """
    check_norm_type(norm_type)
    if divisor < 1:
        raise ValueError(f'divisor must be at least 1, got {divisor}')
    return _norm(gradients, norm_type) / divisor if gradients else 0.0


def clip_by_norm(gradients: Sequence[Tensor], *, max_norm: float, norm_type: float = 2.0, divisor: int = 1) -> float:
    """Scale the gradients so that their divided norm is at most `max_norm`; return the divided norm before scaling.

    A gradient within the limit is bitwise unchanged.

    Args:
        gradients: tensors on one device; scaled in place.
        max_norm: at least 0; infinity measures the norm without clipping.
        norm_type: see `gradient_norm`.
        divisor: see `gradient_norm`.

    Raises:
        ValueError: an argument is out of range.
        GradientNotFinite: an element is infinite or NaN.
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
    """Clip each divided element to `[-max_value, max_value]`; return the largest divided magnitude before clipping.

    Raises:
        ValueError: an argument is out of range.
        GradientNotFinite: an element is infinite or NaN.
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
    """Validate the p of a p-norm.

    Raises:
        ValueError: the value is not a number of at least 1. Smaller values do not define a norm, and their roots
            overflow.
    """
    if not norm_type >= 1.0:
        raise ValueError(f'norm_type must be a number of at least 1 or infinity, got {norm_type}')


def _check_limit(name: str, limit: float) -> None:
    if not limit >= 0.0:
        raise ValueError(f'{name} must be a number of at least 0, got {limit}')


def _norm(gradients: Sequence[Tensor], norm_type: float) -> float:
    norm = _total_norm(gradients, norm_type)
    # In this range, powers up to 2 do not overflow, and underflow has no relevant effect, so the first result is
    # accurate enough and no second pass is needed.
    if math.isinf(norm_type) or (norm_type <= 2.0 and _SMALL < norm < _LARGE):
        return norm
    largest = _total_norm(gradients, math.inf)
    if not math.isfinite(largest) or largest == 0.0 or (math.isfinite(norm) and norm >= largest):
        return norm if largest else 0.0
    # Scale the largest element to 1 before taking powers.
    return largest * _total_norm([item / largest for item in gradients], norm_type)


def _total_norm(gradients: Sequence[Tensor], norm_type: float) -> float:
    norm = torch.nn.utils.get_total_norm(gradients, norm_type=norm_type)
    # `float` of a DTensor may return the norm of this rank's shard only.
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
