"""An adapter's whole state as named tensors, to be saved and restored. Nothing is ever pickled.

The trainer's part holds the optimizer's tensors, the random state and the accumulated gradient,
and, as one uint8 tensor of JSON, the numbers and names beside them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle.data_format import LoraConfig, TensorData
from twinkle.model.engine.adapter_state import AdapterState, ComponentChoice
from twinkle.model.errors import SnapshotMismatch
from twinkle.nn import tensor_data_of, tensor_of

STATE_TENSOR = 'trainer_state'
"""Name of the tensor that holds the JSON."""
_RANDOM_STATE = 'dropout_generator'
_FORMAT = 1


@dataclass(frozen=True)
class AdapterSnapshot:
    """An immutable copy."""

    lora_config: LoraConfig
    adapter: Mapping[str, TensorData]
    """By peft's names."""
    trainer: Mapping[str, TensorData] | None
    """What it takes to resume; None for the weights alone."""
    step_count: int


def take_snapshot(
    state: AdapterState, *, is_optimizer_included: bool, extra: Mapping[str, int] | None = None
) -> AdapterSnapshot:
    """Copy an adapter's state.

    Args:
        state: only read.
        is_optimizer_included: optimizer, schedule, counters, random state and accumulated gradient too.
        extra: counters of the caller's own, such as `consumed_train_samples`.
    """
    adapter = {name: tensor_data_of(tensor) for name, tensor in state.weights.peft_state().items()}
    trainer = _trainer_tensors(state, extra or {}) if is_optimizer_included else None
    return AdapterSnapshot(state.config, adapter, trainer, state.step_count)


def restore_snapshot(state: AdapterState, snapshot: AdapterSnapshot, *, is_optimizer_included: bool) -> None:
    """Make an adapter what it was. Everything is checked, and the new optimizer built, before anything changes.

    Raises:
        SnapshotMismatch: the snapshot is of another configuration, malformed, or holds no trainer's part.
    """
    _check_config(state, snapshot)
    if not is_optimizer_included:
        _load_weights(state, snapshot)
        state.drop_gradient()
        return
    numbers = trainer_state(snapshot)
    rebuilt = _Rebuilt.of(state, snapshot.trainer or {}, numbers)
    _load_weights(state, snapshot)
    rebuilt.move_into(state)


def trainer_state(snapshot: AdapterSnapshot) -> dict[str, Any]:
    """Return the numbers and names of a snapshot's trainer part.

    Raises:
        SnapshotMismatch: it has none, or it is malformed.
    """
    if not snapshot.trainer or STATE_TENSOR not in snapshot.trainer:
        raise SnapshotMismatch('the checkpoint holds no optimizer state; it was saved without')
    try:
        numbers = json.loads(bytes(snapshot.trainer[STATE_TENSOR].data))
    except ValueError as error:
        raise SnapshotMismatch(f'the trainer state is not JSON: {error}') from None
    if not isinstance(numbers, dict) or numbers.get('format') != _FORMAT:
        raise SnapshotMismatch(f'the trainer state is not of format {_FORMAT}')
    return numbers


def _trainer_tensors(state: AdapterState, extra: Mapping[str, int]) -> dict[str, TensorData]:
    tensors: dict[str, Tensor] = {_RANDOM_STATE: state.weights.dropout_generator.get_state()}
    for name, parameter in state.weights.named_parameters().items():
        if parameter.grad is not None:
            tensors[f'gradient.{name}'] = parameter.grad
    saved = state.optimizer.state_dict()
    scalars: dict[str, dict[str, Any]] = {}
    for index, entries in saved['state'].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f'optimizer.{index}.{key}'] = value
            else:
                scalars.setdefault(str(index), {})[key] = value
    numbers = {
        'format': _FORMAT,
        'step_count': state.step_count,
        'batch_count': state.batch_count,
        'divisor': state.divisor,
        'gradient_accumulation_steps': state.gradient_accumulation_steps,
        'optimizer': _choice_json(state.optimizer_choice),
        'optimizer_scalars': scalars,
        'param_groups': saved['param_groups'],
        'lr_scheduler': _choice_json(state.scheduler_choice),
        'lr_scheduler_state': _scheduler_numbers(state),
        'extra': dict(extra),
    }
    data = json.dumps(numbers).encode()
    packed = {name: tensor_data_of(tensor) for name, tensor in tensors.items()}
    return {**packed, STATE_TENSOR: TensorData('uint8', (len(data),), data)}


def _choice_json(choice: ComponentChoice | None) -> dict[str, Any] | None:
    return None if choice is None else {'name': choice.name, 'options': dict(choice.options)}


def _scheduler_numbers(state: AdapterState) -> dict[str, Any]:
    if state.scheduler is None:
        return {}
    # What is no number or list follows from the options and is built again from them.
    saved = state.scheduler.state_dict().items()
    return {key: value for key, value in saved if isinstance(value, int | float | list | None)}


def _check_config(state: AdapterState, snapshot: AdapterSnapshot) -> None:
    own, saved = state.weights.peft_state(), snapshot.adapter
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    if shapes != {name: tensor.shape for name, tensor in saved.items()}:
        raise SnapshotMismatch('the checkpoint has other layers or ranks than the adapter; use its LoRA configuration')
    for name in ('lora_alpha', 'use_rslora', 'alpha_pattern'):
        if getattr(state.config, name) != getattr(snapshot.lora_config, name):
            raise SnapshotMismatch(
                f'{name} of the checkpoint is {getattr(snapshot.lora_config, name)}, '
                f'of the adapter {getattr(state.config, name)}; they must be equal'
            )


def _load_weights(state: AdapterState, snapshot: AdapterSnapshot) -> None:
    state.weights.load_peft_state({name: tensor_of(data) for name, data in snapshot.adapter.items()})


@dataclass(frozen=True)
class _Rebuilt:
    """What a trainer's part says, built but not yet in use."""

    twin: AdapterState
    gradient: list[Tensor] | None
    random_state: Tensor

    @classmethod
    def of(cls, state: AdapterState, tensors: Mapping[str, TensorData], numbers: dict[str, Any]) -> '_Rebuilt':
        """Build.

        Raises:
            SnapshotMismatch: the trainer's part is malformed.
        """
        try:
            twin = _twin(state, tensors, numbers)
            names = [f'gradient.{name}' for name in state.weights.peft_state()]
            gradient = [tensor_of(tensors[name]) for name in names] if names[0] in tensors else None
            random_state = tensor_of(tensors[_RANDOM_STATE])
            torch.Generator().set_state(random_state)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise SnapshotMismatch(f'the trainer state does not fit the adapter: {error}') from error
        return cls(twin, gradient, random_state)

    def move_into(self, state: AdapterState) -> None:
        """Put what was built into use."""
        state.drop_gradient()
        state.optimizer, state.optimizer_choice = self.twin.optimizer, self.twin.optimizer_choice
        state.scheduler, state.scheduler_choice = self.twin.scheduler, self.twin.scheduler_choice
        state.step_count, state.batch_count = self.twin.step_count, self.twin.batch_count
        state.divisor = self.twin.divisor
        state.weights.dropout_generator.set_state(self.random_state)
        if self.gradient is not None:
            for parameter, tensor in zip(state.weights.parameters(), self.gradient, strict=True):
                parameter.grad = tensor.to(parameter.device)


def _twin(state: AdapterState, tensors: Mapping[str, TensorData], numbers: dict[str, Any]) -> AdapterState:
    """Return a state over the same parameters with the saved optimizer, schedule and counters."""
    twin = AdapterState(state.adapter_id, state.weights, state.optimizer, state.optimizer_choice)
    twin.set_optimizer(_saved_choice(numbers['optimizer'], state.optimizer_choice))
    if numbers['lr_scheduler'] is not None:
        twin.set_scheduler(_saved_choice(numbers['lr_scheduler'], state.scheduler_choice))
        twin.scheduler.load_state_dict({**twin.scheduler.state_dict(), **numbers['lr_scheduler_state']})
    entries: dict[int, dict[str, Any]] = {
        int(index): dict(values) for index, values in numbers['optimizer_scalars'].items()
    }
    for name, data in tensors.items():
        if name.startswith('optimizer.'):
            _, index, key = name.split('.', 2)
            entries.setdefault(int(index), {})[key] = tensor_of(data)
    twin.optimizer.load_state_dict({'state': entries, 'param_groups': numbers['param_groups']})
    twin.step_count = int(numbers['step_count'])
    twin.batch_count, twin.divisor = int(numbers['batch_count']), int(numbers['divisor'])
    return twin


def _saved_choice(saved: dict[str, Any], present: ComponentChoice | None) -> ComponentChoice:
    # A class of the user's own has no registered name; where the same one is set already, it is used.
    component = present.component if present is not None and present.name == saved['name'] else saved['name']
    return ComponentChoice(component, saved['options'])
