"""A loss of the caller's own, computed where the caller is: from log-probabilities to their gradient.

The trainer's `forward` gives log-probabilities, `custom_gradients` here what to give its
`backward(logprob_gradients=...)`. No code leaves the caller's process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinkle.data_format import IGNORE_INDEX, InputFeature
from twinkle.loss.errors import InvalidLossInput

CustomLoss = Callable[[Sequence[InputFeature], list[Tensor]], 'Tensor | tuple[Tensor, Mapping[str, Any]]']
"""`(features, logps) -> loss` or `-> (loss, metrics)`.

`logps`: for each feature float32 [T], natural log-probability of each label, 0.0 where it is ignored, all of them
with gradient. The loss is a scalar made of them by torch; metrics are numbers.
"""


@dataclass(frozen=True)
class CustomGradients:
    """What a custom loss gave."""

    loss: float
    metrics: dict[str, float]
    gradients: list[npt.NDArray[np.float32]]
    """float32 [T] for each feature: the gradient of the loss by each label's log-probability, so that a step goes
    against it: positive makes the label rarer. 0.0 where the label is ignored."""


def custom_gradients(
    function: CustomLoss,
    features: Sequence[InputFeature],
    logps: Sequence[npt.ArrayLike],
    *,
    ignore_index: int = IGNORE_INDEX,
) -> CustomGradients:
    """Return a custom loss and its gradient by the log-probabilities.

    Args:
        function: the loss; see `CustomLoss`. Called once.
        features: as they were given to the forward pass, with labels.
        logps: its log-probabilities, one array [T] for each feature.
        ignore_index: label that does not count, beside `IGNORE_INDEX`.

    Raises:
        InvalidLossInput: features and log-probabilities do not fit each other, or the loss is no finite scalar that
            depends on them, or its gradient is not finite.
    """
    if len(features) != len(logps):
        raise InvalidLossInput(f'there are {len(features)} features and {len(logps)} arrays of log-probabilities')
    masks = [_counting(feature, index, ignore_index) for index, feature in enumerate(features)]
    leaves = [_leaf(values, mask, index) for index, (values, mask) in enumerate(zip(logps, masks, strict=True))]
    with torch.enable_grad():
        returned = function(features, leaves)
        loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
        _check_loss(loss)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    arrays = [
        _checked(gradient, mask, index) for index, (gradient, mask) in enumerate(zip(gradients, masks, strict=True))
    ]
    return CustomGradients(_number(loss), {name: _number(value) for name, value in metrics.items()}, arrays)


def _counting(feature: InputFeature, index: int, ignore_index: int) -> npt.NDArray[np.bool_]:
    if 'labels' not in feature:
        raise InvalidLossInput('has no labels', index=index)
    labels = np.asarray(feature['labels'])
    return (labels != IGNORE_INDEX) & (labels != ignore_index)


def _leaf(values: npt.ArrayLike, mask: npt.NDArray[np.bool_], index: int) -> Tensor:
    array = np.array(values, np.float32)
    if array.shape != mask.shape:
        raise InvalidLossInput(f'has {len(mask)} labels, but log-probabilities of shape {array.shape}', index=index)
    return torch.from_numpy(array).requires_grad_()


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise InvalidLossInput('a custom loss must return a scalar tensor, or one with metrics')
    if not loss.requires_grad:
        raise InvalidLossInput('the custom loss does not depend on the log-probabilities')
    if not bool(torch.isfinite(loss).all()):
        raise InvalidLossInput(f'the custom loss is {float(loss.detach())}')


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _checked(gradient: Tensor, mask: npt.NDArray[np.bool_], index: int) -> npt.NDArray[np.float32]:
    array = np.where(mask, gradient.numpy(force=True), np.float32(0.0))
    if not np.isfinite(array).all():
        raise InvalidLossInput('has no finite gradient of the custom loss', index=index)
    return array
