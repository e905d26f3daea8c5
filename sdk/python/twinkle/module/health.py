"""Health of an optimizer step per layer: norms, relative size of the update, and the first non-finite element."""

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from twinkle.data_format import LayerHealth

_PREFIX = 'base_model.model.'
_PART = re.compile(r'\.(lora_[AB])\.weight$')


def measure_health(
    gradients: Mapping[str, Tensor | None],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor] | None = None,
    *,
    divisor: int = 1,
) -> list[LayerHealth]:
    """Return the health of each layer, for a step or for a gradient that is not applied yet.

    Args:
        gradients: accumulated gradients by parameter name; None counts as zeros.
        before: weights before the step, by the same names; their order is the order of the result.
        after: weights after the step; None if no step was applied.
        divisor: divisor of the gradients, at least 1.

    Returns:
        One `LayerHealth` per layer, in the order of `before`.

    Raises:
        KeyError: a name of `before` is missing from `gradients` or `after`.
    """
    layers: dict[str, list[str]] = {}
    for name in before:
        layers.setdefault(layer_path(name), []).append(name)
    return [
        _layer(path, names, gradients=gradients, before=before, after=after or before, divisor=divisor)
        for path, names in layers.items()
    ]


def layer_path(name: str) -> str:
    """Return the path in the base model of the layer that a parameter belongs to."""
    without_part = _PART.sub('', name)
    if without_part == name:
        without_part = name.rpartition('.')[0] or name
    return without_part.removeprefix(_PREFIX)


def first_non_finite(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the index of the first infinite or NaN element in row-major order, or None if all are finite."""
    if bool(tensor.isfinite().all()):
        return None
    flat = int((~tensor.isfinite()).reshape(-1).to(torch.uint8).argmax())
    return tuple(int(index) for index in torch.unravel_index(torch.tensor(flat), tensor.shape))


def _layer(
    path: str,
    names: Sequence[str],
    *,
    gradients: Mapping[str, Tensor | None],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    divisor: int,
) -> LayerHealth:
    present = {name: gradients[name] for name in names if gradients[name] is not None}
    weight_norm = _norm([before[name] for name in names])
    update_norm = _norm([after[name].double() - before[name].double() for name in names])
    locations = [
        *_locations(present, 'gradient'),
        *_locations({name: before[name] for name in names}, 'weight'),
        *_locations({name: after[name] for name in names}, 'updated weight'),
    ]
    return LayerHealth(
        path=path,
        grad_norm=_norm(list(present.values())) / divisor,
        weight_norm=weight_norm,
        relative_update=_ratio(update_norm, weight_norm),
        non_finite_location=locations[0] if locations else '',
    )


def _norm(tensors: Sequence[Tensor]) -> float:
    # Squares of float32 values neither overflow nor underflow in float64.
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _ratio(update: float, weight: float) -> float:
    if update == 0.0:
        return 0.0
    return update / weight if weight else math.inf


def _locations(tensors: Mapping[str, Tensor], kind: str) -> list[str]:
    found = ((name, first_non_finite(tensor)) for name, tensor in tensors.items())
    return [f'{_tensor_name(name)}{list(index)} of the {kind}' for name, index in found if index is not None]


def _tensor_name(name: str) -> str:
    part = _PART.search(name)
    return part.group(1) if part else name.rpartition('.')[2]
