"""Metrics of losses, and their reduction over the parts of a batch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from twinkle.data_format import LossOutput


def mean_of(values: Tensor) -> Tensor:
    """Return the mean without gradient; 0 for an empty tensor."""
    return values.detach().double().sum() / max(values.numel(), 1)


def as_numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return scalar tensors as floats, with one transfer from the device."""
    if not values:
        return {}
    numbers = torch.stack([value.detach().double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))


def merge_metrics(outputs: Sequence[LossOutput]) -> dict[str, float]:
    """Return the metrics of a batch that ran in parts.

    A metric whose name ends in `:sum`, `:min` or `:max` is reduced accordingly. All other metrics are averaged with the
    weights `LossOutput.metric_weight`. The metrics of a single part are unchanged.
    """
    if len(outputs) == 1:
        return dict(outputs[0].get('metrics', {}))
    merged: dict[str, float] = {}
    for name in sorted({name for output in outputs for name in output.get('metrics', {})}):
        with_metric = [output for output in outputs if name in output.get('metrics', {})]
        values = [output['metrics'][name] for output in with_metric]
        weights = [output.get('metric_weight', 1.0) for output in with_metric]
        merged[name] = _reduced(name, values, weights)
    return merged


def _reduced(name: str, values: list[float], weights: list[float]) -> float:
    match name.rpartition(':')[2]:
        case 'sum':
            return sum(values)
        case 'min':
            return min(values)
        case 'max':
            return max(values)
    weighted = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return weighted / sum(weights) if sum(weights) else 0.0
