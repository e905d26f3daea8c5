"""Restoration of an adapter's state from named tensors, which may come from a client or a disk.

The state is built over the adapter's parameters and validated before the adapter is changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle.data_format import TensorData
from twinkle.loss import LOSSES
from twinkle.metric import METRICS
from twinkle.model.engine.adapter_state import AdapterState, ConfiguredMetric
from twinkle.model.engine.optimization import ComponentChoice, Optimization
from twinkle.model.engine.owner import AdapterOwner
from twinkle.model.engine.snapshot import (
    GRADIENT,
    OPTIMIZER,
    RANDOM_STATE,
    AdapterSnapshot,
    divided_snapshot,
    trainer_state,
)
from twinkle.model.engine.value_head import ValueHead
from twinkle.model.errors import SnapshotMismatch
from twinkle.module import OptimizerState, load_optimizer_state, load_scheduler_state
from twinkle.nn import FullWeights, LoraWeights, PackedModel, select_parameters, tensor_of
from twinkle.processor import PROCESSORS

_MAX_COUNT = 1 << 53
"""Maximum of each counter; JSON and the wire format represent all integers up to this value."""
_MALFORMED = (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError, ArithmeticError)
"""Exceptions raised for malformed numbers and names."""


def restore_snapshot(
    state: AdapterState, snapshot: AdapterSnapshot, *, is_optimizer_included: bool, hidden_size: int
) -> None:
    """Load a checkpoint into a configured adapter: its weights, and if requested the state for resuming.

    The accumulated gradient is cleared, or replaced by the gradient in the state for resuming.

    Raises:
        SnapshotMismatch: the snapshot has a different configuration, is malformed, or lacks the requested state for
            resuming; nothing was changed.
    """
    _check_config(state, snapshot)
    snapshot = divided_snapshot(snapshot, state.weights.named_parameters())
    part = head = None
    if is_optimizer_included:
        part = _TrainerPart.build(state, snapshot, hidden_size=hidden_size)
    else:
        head = _value_head_only(state, snapshot, hidden_size)
    state.weights.load_peft_state({name: tensor_of(data) for name, data in snapshot.adapter.items()})
    state.drop_gradient()
    if part is not None:
        part.apply_to(state)
    if head is not None:
        _set_value_head(state, head)


def restored_adapter(
    adapter_id: str, snapshot: AdapterSnapshot, model: PackedModel, *, owner: AdapterOwner | None
) -> AdapterState:
    """Create an adapter from a whole snapshot. Every rank must call it.

    Only the owner keeps the gradient and the optimizer's state.

    Raises:
        SnapshotMismatch: the snapshot is incomplete, malformed, or of another model.
    """
    numbers = trainer_state(snapshot)
    if 'configuration' not in numbers:
        raise SnapshotMismatch('the snapshot does not include the configuration; load it as a checkpoint')
    weights = None
    try:
        if snapshot.full_parameters is not None:
            trained = select_parameters(model.base_parameters, snapshot.full_parameters)
            snapshot = divided_snapshot(snapshot, trained)
        weights = _weights(snapshot, model)
        state = AdapterState.create(
            adapter_id,
            weights,
            gradient_accumulation_steps=int(numbers['gradient_accumulation_steps']),
            owner=owner,
        )
        _configure(state, numbers['configuration'])
        _TrainerPart.build(state, snapshot, hidden_size=model.config.hidden_size).apply_to(state)
    except _MALFORMED as error:
        if isinstance(weights, FullWeights):
            weights.release()
        if isinstance(error, SnapshotMismatch):
            raise
        raise SnapshotMismatch(f'the snapshot does not fit the model: {error}') from error
    return state


def _weights(snapshot: AdapterSnapshot, model: PackedModel) -> LoraWeights | FullWeights:
    tensors = {name: tensor_of(data) for name, data in snapshot.adapter.items()}
    if snapshot.full_parameters is None:
        return LoraWeights.from_peft_state(
            model.targets, snapshot.lora_config, tensors, device=str(model.device), is_trainable=True
        )
    weights = FullWeights(model, snapshot.full_parameters)
    try:
        weights.load_peft_state(tensors)
    except ValueError:
        weights.release()
        raise
    return weights


def _configure(state: AdapterState, configuration: Mapping[str, Any]) -> None:
    loss, processor = configuration['loss'], configuration['processor']
    state.loss = LOSSES.build(loss['name'], loss['options'])
    state.loss_choice = _choice(loss)
    state.processor = PROCESSORS.build(processor['name'], processor['options'])
    state.processor_choice = _choice(processor)
    state.metrics_in_training = _metrics(configuration['train_metrics'])
    state.metrics_in_evaluation = _metrics(configuration['eval_metrics'])


def _metrics(saved: Sequence[Mapping[str, Any]]) -> tuple[ConfiguredMetric, ...]:
    used: list[ConfiguredMetric] = []
    for entry in saved:
        metric = METRICS.build(entry['name'], entry['options'])
        metric.load_state(entry['state'])
        used.append(ConfiguredMetric(metric, _choice(entry)))
    return tuple(used)


def _check_config(state: AdapterState, snapshot: AdapterSnapshot) -> None:
    own, saved = state.weights.peft_state(), snapshot.adapter
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    if shapes != {name: tensor.shape for name, tensor in saved.items()}:
        raise SnapshotMismatch(
            'the layers or LoRA ranks of the checkpoint differ from the adapter; create an adapter with '
            'the configuration of the checkpoint'
        )
    if state.config is None:
        return
    for name in ('lora_alpha', 'use_rslora', 'alpha_pattern'):
        if getattr(state.config, name) != getattr(snapshot.lora_config, name):
            raise SnapshotMismatch(
                f'{name} is {getattr(snapshot.lora_config, name)} in the checkpoint and '
                f'{getattr(state.config, name)} in the adapter; they must be equal'
            )


@dataclass(frozen=True)
class _TrainerPart:
    """State for resuming, built over an adapter's parameters but not yet applied."""

    optimization: Optimization
    value_head: ValueHead | None
    gradient: Mapping[str, Tensor]
    random_state: Tensor
    counters: Mapping[str, int | float | None]

    @classmethod
    def build(cls, state: AdapterState, snapshot: AdapterSnapshot, *, hidden_size: int) -> '_TrainerPart':
        """Build the state of a snapshot.

        Raises:
            SnapshotMismatch: the snapshot lacks the state for resuming, or it is malformed.
        """
        numbers = trainer_state(snapshot)
        tensors = snapshot.trainer or {}
        try:
            head = _value_head(state, tensors, hidden_size) or state.value_head
            parameters = {**state.weights.named_parameters(), **({} if head is None else head.named_parameters())}
            random_state = tensor_of(tensors[RANDOM_STATE])
            torch.Generator().set_state(random_state)
            return cls(
                optimization=_optimization(state, parameters, tensors, numbers),
                value_head=head,
                gradient=_gradient(parameters, tensors),
                random_state=random_state,
                counters={
                    **{name: _count(name, numbers[name]) for name in ('step_count', 'batch_count', 'divisor')},
                    'grad_norm': None if numbers['grad_norm'] is None else float(numbers['grad_norm']),
                },
            )
        except _MALFORMED as error:
            raise SnapshotMismatch(f'the trainer state does not fit the adapter: {error}') from error

    def apply_to(self, state: AdapterState) -> None:
        """Apply the state to the adapter."""
        state.drop_gradient()
        state.replace_optimization(self.optimization)
        state.value_head = self.value_head
        state.weights.dropout_generator.set_state(self.random_state)
        for name, value in self.counters.items():
            setattr(state, name, value)
        if state.is_held_here:
            for name, parameter in state.named_parameters().items():
                parameter.grad = self.gradient.get(name)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f'{name} must be an integer from 0 to 2^53, got {value!r}')
    return value


def _value_head(state: AdapterState, tensors: Mapping[str, TensorData], hidden_size: int) -> ValueHead | None:
    head = ValueHead(hidden_size, device=state.weights.parameters()[0].device)
    if not any(name in tensors for name in head.named_parameters()):
        return None
    if isinstance(state.weights, FullWeights) and state.weights.is_sharded:
        raise ValueError('a full-parameter run with fsdp ranks does not support value heads; use dp_size alone')
    with torch.no_grad():
        for name, parameter in head.named_parameters().items():
            parameter.copy_(_like(parameter, tensors[name], name))
    return head


def _value_head_only(state: AdapterState, snapshot: AdapterSnapshot, hidden_size: int) -> ValueHead | None:
    """Return the value head of a checkpoint that is loaded without optimizer, or None if there is no value head."""
    try:
        return _value_head(state, snapshot.value_head or {}, hidden_size)
    except _MALFORMED as error:
        raise SnapshotMismatch(f'the value head does not fit the adapter: {error}') from error


def _set_value_head(state: AdapterState, head: ValueHead) -> None:
    """Set the weights of the adapter's value head; the optimizer state of an existing head is preserved."""
    if state.value_head is None:
        state.add_value_head(head)
        return
    with torch.no_grad():
        for own, loaded in zip(
            state.value_head.named_parameters().values(), head.named_parameters().values(), strict=True
        ):
            own.copy_(loaded)


def _gradient(parameters: Mapping[str, Tensor], tensors: Mapping[str, TensorData]) -> dict[str, Tensor]:
    return {
        name: _like(parameter, tensors[GRADIENT + name], GRADIENT + name).to(parameter.device)
        for name, parameter in parameters.items()
        if GRADIENT + name in tensors
    }


def _like(parameter: Tensor, data: TensorData, name: str) -> Tensor:
    tensor = tensor_of(data)
    if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
        raise ValueError(f'{name} must be {parameter.dtype} {tuple(parameter.shape)}, got {data.dtype} {data.shape}')
    return tensor


def _optimization(
    state: AdapterState, parameters: Mapping[str, Tensor], tensors: Mapping[str, TensorData], numbers: dict[str, Any]
) -> Optimization:
    """Return the saved optimizer and schedule over the adapter's parameters."""
    rebuilt = Optimization.begin(_choice(numbers['optimizer'], state.optimizer_choice), parameters)
    if numbers['lr_scheduler'] is not None:
        rebuilt = rebuilt.scheduled(_choice(numbers['lr_scheduler'], state.scheduler_choice), parameters)
        load_scheduler_state(rebuilt.scheduler, numbers['lr_scheduler_state'])
    own = {
        name.removeprefix(OPTIMIZER): tensor_of(data) for name, data in tensors.items() if name.startswith(OPTIMIZER)
    }
    load_optimizer_state(rebuilt.optimizer, OptimizerState(own, numbers['optimizer_numbers']))
    return rebuilt


def _choice(saved: Mapping[str, Any], present: ComponentChoice | None = None) -> ComponentChoice:
    # A custom class has no registered name. If the adapter already uses a class with the saved name, use that class.
    component = present.component if present is not None and present.name == saved['name'] else saved['name']
    return ComponentChoice(component, dict(saved['options']))
