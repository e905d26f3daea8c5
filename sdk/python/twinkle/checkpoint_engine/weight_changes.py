"""The changes that a merge applies to base weights: LoRA updates, or replacement by fully trained weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twinkle.checkpoint_engine.errors import AdapterMismatch
from twinkle.checkpoint_engine.float_bytes import FLOAT_DTYPES, to_float32
from twinkle.checkpoint_engine.hf_folder import ModelFolder
from twinkle.checkpoint_engine.lora_layers import PREFIX, layer_ranks, scaling_at
from twinkle.data_format import LoraConfig, TensorData

Rows = npt.NDArray[np.float32]


class WeightChange(Protocol):
    """A change of one weight."""

    def changed(self, rows: Rows, begin: int) -> Rows:
        """Return the new values of the given rows of the base weight, which start at row `begin`."""
        ...


@dataclass(frozen=True)
class LoraChange:
    """`W + scaling B A`."""

    a: Rows
    b: Rows
    scaling: float

    def changed(self, rows: Rows, begin: int) -> Rows:
        """Return the rows with the update added."""
        delta = self.b[begin : begin + len(rows)] @ self.a
        delta *= np.float32(self.scaling)
        delta += rows
        return delta


@dataclass(frozen=True)
class Replacement:
    """Replacement of a weight."""

    values: Rows

    def changed(self, rows: Rows, begin: int) -> Rows:
        """Return the rows of the new weight."""
        return self.values[begin : begin + len(rows)]


def changes_of(
    base: ModelFolder, state: Mapping[str, TensorData], config: LoraConfig | None
) -> Mapping[str, WeightChange]:
    """Return the changes, by the name of the weight, after checking them against the model.

    Args:
        base: the base model.
        state: an adapter by PEFT's canonical names, or full weights by the model's names.
        config: configuration of the adapter. None: `state` contains full weights.

    Raises:
        AdapterMismatch: the adapter is inconsistent, a weight is not a floating-point tensor, or the model lacks the
            weight or has another shape for it.
    """
    return _replacements(base, state) if config is None else _updates(base, state, config)


def _updates(base: ModelFolder, state: Mapping[str, TensorData], config: LoraConfig) -> dict[str, WeightChange]:
    try:
        ranks = layer_ranks({name: tensor.shape for name, tensor in state.items()})
    except ValueError as error:
        raise AdapterMismatch(str(error)) from None
    changes: dict[str, WeightChange] = {}
    for path in ranks:
        a, b = (_float32(state[f'{PREFIX}{path}.lora_{part}.weight']) for part in 'AB')
        name = f'{path}.weight'
        _check(base, name, (b.shape[0], a.shape[1]))
        changes[name] = LoraChange(a, b, scaling_at(path, config))
    return changes


def _replacements(base: ModelFolder, state: Mapping[str, TensorData]) -> dict[str, WeightChange]:
    for name, tensor in state.items():
        _check(base, name, tensor.shape)
    return {name: Replacement(_float32(tensor).reshape(tensor.shape[0], -1)) for name, tensor in state.items()}


def _check(base: ModelFolder, name: str, shape: tuple[int, ...]) -> None:
    weight = base.entries.get(name)
    if weight is None:
        raise AdapterMismatch(f'the base model has no weight {name}')
    if weight.shape != shape or weight.dtype not in FLOAT_DTYPES:
        raise AdapterMismatch(
            f'{name} is {weight.dtype} {weight.shape} in the base model, but the change has shape {shape}'
        )


def _float32(tensor: TensorData) -> Rows:
    if tensor.dtype not in FLOAT_DTYPES:
        raise AdapterMismatch(f'weights of type {tensor.dtype} cannot be merged')
    return to_float32(tensor.data, tensor.dtype).reshape(tensor.shape)
