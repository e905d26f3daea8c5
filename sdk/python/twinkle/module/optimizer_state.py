"""Optimizer state as tensors and plain numbers, saved without pickle and restored bitwise."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class OptimizerState:
    """State of an optimizer. Parameters are numbered in the order of its groups."""

    tensors: Mapping[str, Tensor]
    """Tensors by `<parameter number>.<name>`; they alias the optimizer's state."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """JSON-compatible values: `scalars` by parameter number and name, and `param_groups`."""


def optimizer_state(optimizer: Optimizer) -> OptimizerState:
    """Return the state of an optimizer; its tensors are not copied."""
    saved = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for index, entries in saved['state'].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f'{index}.{name}'] = value
            else:
                scalars.setdefault(str(index), {})[name] = value
    groups = [
        {name: list(value) if isinstance(value, tuple) else value for name, value in group.items()}
        for group in saved['param_groups']
    ]
    return OptimizerState(tensors, {'scalars': scalars, 'param_groups': groups})


def load_optimizer_state(optimizer: Optimizer, state: OptimizerState) -> None:
    """Restore a state in an optimizer built with the same options over parameters of the same shapes.

    Raises:
        ValueError, LookupError, TypeError: the state does not match the optimizer; nothing was changed.
    """
    entries: dict[int, dict[str, Any]] = {
        int(index): dict(values) for index, values in state.numbers['scalars'].items()
    }
    for key, tensor in state.tensors.items():
        index, _, name = key.partition('.')
        entries.setdefault(int(index), {})[name] = tensor.clone()
    groups = [
        {name: tuple(value) if isinstance(value, list) and name != 'params' else value for name, value in group.items()}
        for group in state.numbers['param_groups']
    ]
    _check(optimizer, entries, groups)
    optimizer.load_state_dict({'state': entries, 'param_groups': groups})


def _check(optimizer: Optimizer, entries: Mapping[int, Mapping[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Check the shapes of moments, because torch accepts wrong shapes and fails only during the next step."""
    counts = [len(group['params']) for group in optimizer.param_groups]
    if counts != [len(group['params']) for group in groups]:
        raise ValueError(f'the state does not have parameter groups of {counts} parameters')
    parameters = [parameter for group in optimizer.param_groups for parameter in group['params']]
    for index, values in entries.items():
        shape = parameters[index].shape
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dtype == torch.float32 and value.ndim == len(shape) > 1:
                _check_shape(optimizer, name, value, shape)


def _check_shape(optimizer: Optimizer, name: str, value: Tensor, shape: torch.Size) -> None:
    # Factored moments (Adafactor) have size 1 in dimensions where the parameter is larger.
    if any(size not in (1, own) for size, own in zip(value.shape, shape, strict=True)):
        raise ValueError(f'{name} of {type(optimizer).__name__} has shape {tuple(value.shape)}, not {tuple(shape)}')
