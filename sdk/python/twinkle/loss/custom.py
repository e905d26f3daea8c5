"""Custom losses computed in the caller's process, as gradients with respect to log-probabilities.

The model's `forward` returns log-probabilities, from which `custom_gradients` computes the argument of
`backward(logprob_gradients=...)`. The code of the loss stays in the caller's process.
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

`logps` has one tensor with gradient for each feature of T tokens, float32 [T]: the natural log-probability of each
label, 0.0 where it is ignored. The loss is a torch scalar computed from `logps`; metrics are numbers.
"""


@dataclass(frozen=True)
class CustomGradients:
    """Value, metrics and gradients of a custom loss."""

    loss: float
    metrics: dict[str, float]
    gradients: list[npt.NDArray[np.float32]]
    """float32 [T] for each feature of T tokens: derivative of the loss with respect to each label's log-probability,
    0.0 where the label is ignored. A positive value makes the label less likely."""


def custom_gradients(
    function: CustomLoss,
    features: Sequence[InputFeature],
    logps: Sequence[npt.ArrayLike],
    *,
    ignore_index: int = IGNORE_INDEX,
) -> CustomGradients:
    """Evaluate a custom loss and its gradient with respect to the log-probabilities.

    Args:
        function: the loss, called once; see `CustomLoss`.
        features: features that were given to the forward pass, with labels.
        logps: log-probabilities that the forward pass returned, one array [T] per feature.
        ignore_index: label to ignore, in addition to `IGNORE_INDEX`.

    Raises:
        InvalidLossInput: features and log-probabilities do not match, a feature has no labels, the loss is not a finite
            scalar that depends on the log-probabilities, or its gradient is not finite.
    """
    if len(features) != len(logps):
        raise InvalidLossInput(f'got {len(features)} features but {len(logps)} arrays of log-probabilities')
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
        raise InvalidLossInput('the custom loss must return a scalar tensor, or a scalar tensor and metrics')
    if not loss.requires_grad:
        raise InvalidLossInput('the custom loss does not depend on the log-probabilities')
    if not bool(torch.isfinite(loss).all()):
        raise InvalidLossInput(f'the custom loss must be finite, got {float(loss.detach())}')


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _checked(gradient: Tensor, mask: npt.NDArray[np.bool_], index: int) -> npt.NDArray[np.float32]:
    array = np.where(mask, gradient.numpy(force=True), np.float32(0.0))
    if not np.isfinite(array).all():
        raise InvalidLossInput('has a gradient of the custom loss that is not finite', index=index)
    return array
