"""An adapter's state as named tensors, without pickle. `restoring` contains the inverse functions.

The trainer state consists of the optimizer's tensors, the random state, the accumulated gradient, the value head, and
one uint8 tensor with all numbers and names as JSON. A checkpoint is loaded into a configured adapter, so it omits the
configuration of loss, processor and metrics; a whole snapshot includes that configuration.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from twinkle.data_format import LoraConfig, TensorData
from twinkle.model.engine.adapter_state import AdapterState, ConfiguredMetric
from twinkle.model.engine.optimization import ComponentChoice
from twinkle.model.engine.owner import owned_tensors
from twinkle.model.errors import AdapterNotReady, SnapshotMismatch
from twinkle.module import optimizer_state, scheduler_state
from twinkle.nn import FullWeights, divided_like, gathered, tensor_data_of

STATE_TENSOR = 'trainer_state'
"""Name of the tensor with the JSON."""
RANDOM_STATE = 'dropout_generator'
"""Name of the tensor with the random state of dropout."""
GRADIENT, OPTIMIZER = 'gradient.', 'optimizer.'
"""Name prefixes of the accumulated gradient's and the optimizer's tensors."""
FORMAT = 2
"""Version of the written format; version 1 can also be read."""


@dataclass(frozen=True)
class AdapterSnapshot:
    """Immutable copy of an adapter's state."""

    lora_config: LoraConfig | None
    """LoRA configuration; None for full-parameter training."""
    adapter: Mapping[str, TensorData]
    """Weights by peft's names, or by the base model's parameter names."""
    trainer: Mapping[str, TensorData] | None
    """State for resuming; None for a snapshot of only the weights."""
    step_count: int
    full_parameters: tuple[str, ...] | None = None
    """Names that selected the base model's parameters, empty for all; None for LoRA."""
    value_head: Mapping[str, TensorData] | None = None
    """Value head, if the adapter has a value head; the trainer state contains the head too."""


def take_snapshot(
    state: AdapterState, *, is_optimizer_included: bool, extra: Mapping[str, int] | None = None
) -> AdapterSnapshot:
    """Copy the contents of a checkpoint.

    Args:
        state: state of the adapter; not modified.
        is_optimizer_included: whether to include optimizer, schedule, counters, random state and gradient.
        extra: additional counters, such as `consumed_train_samples`.
    """
    trainer = _trainer_tensors(state, {'extra': dict(extra or {})}) if is_optimizer_included else None
    return _snapshot_of(state, trainer)


def take_whole_snapshot(state: AdapterState) -> AdapterSnapshot:
    """Copy the entire state, from which the adapter can be created again.

    Raises:
        AdapterNotReady: a component has options that are not plain values.
    """
    configuration = {
        'loss': _choice_json(state.loss_choice),
        'processor': _choice_json(state.processor_choice),
        'train_metrics': _metrics_json(state.metrics_in_training),
        'eval_metrics': _metrics_json(state.metrics_in_evaluation),
    }
    try:
        trainer = _trainer_tensors(state, {'extra': {}, 'configuration': configuration})
    except TypeError as error:
        raise AdapterNotReady(state.adapter_id, f'components whose options are plain values: {error}') from error
    return _snapshot_of(state, trainer)


def gathered_snapshot(snapshot: AdapterSnapshot) -> AdapterSnapshot:
    """Return a snapshot with complete tensors. Every rank that has parts must call this function."""
    trainer = None if snapshot.trainer is None else _gathered(snapshot.trainer)
    return replace(snapshot, adapter=_gathered(snapshot.adapter), trainer=trainer)


def divided_snapshot(snapshot: AdapterSnapshot, parameters: Mapping[str, Tensor]) -> AdapterSnapshot:
    """Return this rank's part of a snapshot, if FSDP divides the trained parameters among ranks.

    Args:
        snapshot: snapshot with whole tensors, or with parts, which are unchanged.
        parameters: trained parameters, by the model's parameter names.

    Raises:
        SnapshotMismatch: a gradient or a moment has a shape that no parameter has.
    """
    if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return snapshot
    weights = {
        name: divided_like(like, data) if isinstance(like := parameters.get(name), DTensor) else data
        for name, data in snapshot.adapter.items()
    }
    trainer: dict[str, TensorData] = {}
    for name, data in (snapshot.trainer or {}).items():
        like = divided_parameter(name, data.shape, parameters)
        if like is None and name.startswith((GRADIENT, OPTIMIZER)) and data.shape:
            raise SnapshotMismatch(f'{name} has shape {data.shape}, which no trained weight has')
        trainer[name] = data if like is None else divided_like(like, data)
    return replace(snapshot, adapter=weights, trainer=None if snapshot.trainer is None else trainer)


def divided_parameter(name: str, shape: Sequence[int], parameters: Mapping[str, Tensor]) -> DTensor | None:
    """Return a parameter that FSDP divides like a tensor of the trainer state; None if each rank has the whole tensor.

    Gradients and moments have the shapes of their parameters. Parameters of one shape are divided in the same way.
    """
    if not name.startswith((GRADIENT, OPTIMIZER)):
        return None
    found = (item for item in parameters.values() if isinstance(item, DTensor) and item.shape == torch.Size(shape))
    return next(found, None)


def trainer_state(snapshot: AdapterSnapshot) -> dict[str, Any]:
    """Return the numbers and names of a snapshot's trainer state, converted to the current `FORMAT`.

    Raises:
        SnapshotMismatch: the snapshot has no trainer state, or it is malformed.
    """
    if not snapshot.trainer or STATE_TENSOR not in snapshot.trainer:
        raise SnapshotMismatch('the checkpoint has no optimizer state; load only its weights')
    try:
        numbers = json.loads(bytes(snapshot.trainer[STATE_TENSOR].data))
    except (ValueError, RecursionError) as error:
        raise SnapshotMismatch(f'the trainer state is not JSON: {error}') from None
    if not isinstance(numbers, dict) or numbers.get('format') not in (1, FORMAT):
        raise SnapshotMismatch(f'the trainer state must have format 1 or {FORMAT}')
    if not isinstance(numbers.get('step_count'), int):
        raise SnapshotMismatch('the trainer state has no number of steps')
    return _from_format_1(numbers) if numbers['format'] == 1 else numbers


def _gathered(tensors: Mapping[str, TensorData]) -> dict[str, TensorData]:
    return {name: gathered(data) for name, data in tensors.items()}


def _snapshot_of(state: AdapterState, trainer: Mapping[str, TensorData] | None) -> AdapterSnapshot:
    weights = {name: tensor_data_of(tensor) for name, tensor in state.weights.peft_state().items()}
    targets = state.weights.target_modules if isinstance(state.weights, FullWeights) else None
    head = None
    if state.value_head is not None:
        head = {name: tensor_data_of(tensor) for name, tensor in state.value_head.named_parameters().items()}
    return AdapterSnapshot(state.config, weights, trainer, state.step_count, targets, head)


def _trainer_tensors(state: AdapterState, more: Mapping[str, Any]) -> dict[str, TensorData]:
    saved, owner = optimizer_state(state.optimizer), state.owner
    held = {
        **{GRADIENT + name: item.grad for name, item in state.named_parameters().items() if item.grad is not None},
        **{OPTIMIZER + name: tensor for name, tensor in saved.tensors.items()},
    }
    optimizer_numbers = saved.numbers
    if owner is not None:
        held = owned_tensors(owner, f'copied the tensors of {state.adapter_id}', held)
        optimizer_numbers = owner.run(f'copied the numbers of {state.adapter_id}', lambda: saved.numbers)
    tensors: dict[str, Tensor] = {
        RANDOM_STATE: state.weights.dropout_generator.get_state(),
        **held,
        **({} if state.value_head is None else state.value_head.named_parameters()),
    }
    numbers = {
        'format': FORMAT,
        'step_count': state.step_count,
        'batch_count': state.batch_count,
        'divisor': state.divisor,
        'grad_norm': state.grad_norm,
        'gradient_accumulation_steps': state.gradient_accumulation_steps,
        'optimizer': _choice_json(state.optimizer_choice),
        'optimizer_numbers': dict(optimizer_numbers),
        'lr_scheduler': None if state.scheduler_choice is None else _choice_json(state.scheduler_choice),
        'lr_scheduler_state': {} if state.scheduler is None else scheduler_state(state.scheduler),
        **more,
    }
    data = json.dumps(numbers).encode()
    packed = {name: tensor_data_of(tensor) for name, tensor in tensors.items()}
    return {**packed, STATE_TENSOR: TensorData('uint8', (len(data),), data)}


def _choice_json(choice: ComponentChoice) -> dict[str, Any]:
    return {'name': choice.name, 'options': dict(choice.options)}


def _metrics_json(used: Sequence[ConfiguredMetric]) -> list[dict[str, Any]]:
    return [{**_choice_json(item.choice), 'state': item.metric.state()} for item in used]


def _from_format_1(numbers: Mapping[str, Any]) -> dict[str, Any]:
    optimizer = {'scalars': numbers.get('optimizer_scalars'), 'param_groups': numbers.get('param_groups')}
    return {**numbers, 'grad_norm': None, 'optimizer_numbers': optimizer}
