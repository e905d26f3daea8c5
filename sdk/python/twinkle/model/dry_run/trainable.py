"""Size of the trainable parameters, computed from a configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from twinkle.data_format import LoraConfig
from twinkle.module import build_optimizer
from twinkle.nn.targets import Layers, rank_of, select_layers, trained_shape

_SAMPLE_SHAPE = (64, 64)
"""Shape of the parameter used to measure the optimizer state."""
_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class TrainableSize:
    """Number of trainable float32 parameters, and the size of their optimizer state."""

    parameter_count: int
    optimizer_bytes: int
    is_full_parameter: bool = False

    @property
    def persistent_bytes(self) -> int:
        """Memory of weights and optimizer state."""
        return self.parameter_count * _FLOAT_BYTES + self.optimizer_bytes

    @property
    def gradient_bytes(self) -> int:
        """Memory of one gradient."""
        return self.parameter_count * _FLOAT_BYTES


def lora_size(layers: Layers, config: LoraConfig, *, optimizer: Any, options: Mapping[str, Any]) -> TrainableSize:
    """Return the size of an adapter.

    Args:
        layers: linear layers of the base model.
        config: ranks and targets.
        optimizer: name or class of the optimizer.
        options: arguments of the optimizer.

    Raises:
        UnknownTargetModules: the configuration names layers that the model does not have.
        ExpertDropout: the configuration has dropout and targets experts.
        UnknownComponent, InvalidComponentOptions: the optimizer cannot be built.
    """
    paths = select_layers(layers, config)
    count = sum(rank_of(path, config) * sum(trained_shape(layers, path)) for path in paths)
    return TrainableSize(parameter_count=count, optimizer_bytes=_optimizer_bytes(count, optimizer, options))


def full_size(parameter_counts: Sequence[int], *, optimizer: Any, options: Mapping[str, Any]) -> TrainableSize:
    """Return the size of full-parameter training of tensors with these numbers of scalars.

    Raises:
        UnknownComponent, InvalidComponentOptions: the optimizer cannot be built.
    """
    count = sum(parameter_counts)
    return TrainableSize(
        parameter_count=count, optimizer_bytes=_optimizer_bytes(count, optimizer, options), is_full_parameter=True
    )


def _optimizer_bytes(parameter_count: int, optimizer: Any, options: Mapping[str, Any]) -> int:
    sample = torch.zeros(_SAMPLE_SHAPE, requires_grad=True)
    # Groups need parameter paths, which the sample does not have, and do not change sizes.
    built = build_optimizer(optimizer, [sample], {name: value for name, value in options.items() if name != 'groups'})
    sample.grad = torch.zeros_like(sample)
    built.step()
    state = [value for value in built.state[sample].values() if isinstance(value, torch.Tensor)]
    elementwise = sum(value.numel() * value.element_size() for value in state if value.numel() > 1)
    return round(elementwise / sample.numel() * parameter_count)
