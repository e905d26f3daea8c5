"""The changes that a merge applies to base weights: LoRA updates, or replacement by fully trained weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twinkle.checkpoint_engine.base_layers import base_weights_of
from twinkle.checkpoint_engine.errors import AdapterMismatch
from twinkle.checkpoint_engine.float_bytes import FLOAT_DTYPES, to_float32
from twinkle.checkpoint_engine.hf_folder import ModelFolder
from twinkle.checkpoint_engine.lora_layers import AdapterLayer, adapter_layers, scaling_at
from twinkle.data_format import LoraConfig, TensorData

Rows = npt.NDArray[np.float32]


class WeightChange(Protocol):
    """A change of one weight."""

    def changed(self, rows: Rows, begin: int) -> Rows:
        """Return the new values of the given rows of the base weight, which start at row `begin`."""
        ...


@dataclass(frozen=True)
class LoraChange:
    """The LoRA update of one weight, `W + scaling B A`."""

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
class StackedChange:
    """Changes of the stacked expert weights, in which a row contains the weight of one expert."""

    by_expert: Sequence[LoraChange]

    def changed(self, rows: Rows, begin: int) -> Rows:
        """Return the expert weights with their updates added."""
        changes = self.by_expert[begin : begin + len(rows)]
        inputs = changes[0].a.shape[1]
        new = [change.changed(row.reshape(-1, inputs), 0) for change, row in zip(changes, rows, strict=True)]
        return np.stack(new).reshape(len(rows), -1)


@dataclass(frozen=True)
class Replacement:
    """Replacement of a weight by fully trained values."""

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
            weight or has a different shape for it.
    """
    return _replacements(base, state) if config is None else _updates(base, state, config)


def _updates(base: ModelFolder, state: Mapping[str, TensorData], config: LoraConfig) -> dict[str, WeightChange]:
    try:
        layers = adapter_layers({name: tensor.shape for name, tensor in state.items()}, config)
    except ValueError as error:
        raise AdapterMismatch(str(error)) from None
    changes: dict[str, WeightChange] = {}
    for layer in layers:
        weights = base_weights_of(layer, base.entries)
        for name, shape in weights.items():
            _check(base, name, shape)
        a, b = (_float32(state[layer.tensor_name(part)]) for part in 'AB')
        changes |= _changes(list(weights), layer, a, b, scaling_at(layer.path, config))
    return changes


def _changes(names: Sequence[str], layer: AdapterLayer, a: Rows, b: Rows, scaling: float) -> dict[str, WeightChange]:
    """Return the changes of the weights that an adapted layer consists of in the base model's folder."""
    count = layer.expert_count
    if count is None:
        return {names[0]: LoraChange(a, b, scaling)}
    a_of = a.reshape(count, layer.rank, -1)
    by_expert = [LoraChange(a_of[expert], b[:, expert::count], scaling) for expert in range(count)]
    if len(names) == 1:
        return {names[0]: StackedChange(by_expert)}
    part_count = len(names) // count
    parts = (LoraChange(change.a, b, scaling) for change in by_expert for b in np.split(change.b, part_count))
    return dict(zip(names, parts, strict=True))


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
