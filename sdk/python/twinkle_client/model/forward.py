"""Inputs and outputs of a forward pass."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

import numpy as np
import numpy.typing as npt

from twinkle.api.model.v1 import operation_pb2, operation_result_pb2
from twinkle_client.convert import features_to_proto, tensor_from_proto, trajectory_to_proto
from twinkle_client.convert.features import PER_LABEL
from twinkle_client.dataloader.handle import BatchHandle, loader_state
from twinkle_client.model.receipt import Receipt, receipt_of

_log = logging.getLogger('twinkle_client')
_OPTIONS = frozenset({'temperature', 'disable_lora', 'return_logps', 'micro_batch_size'})

Inputs = Sequence[Mapping[str, Any]] | Mapping[str, Any] | BatchHandle


class ForwardOutput(TypedDict):
    """Result of a forward pass over N examples."""

    loss: float
    """The batch's loss: a weighted sum over labels, unless the loss says otherwise."""
    num_tokens: int
    """Labels that counted."""
    logps: list[npt.NDArray[np.float32]]
    """N arrays [T], natural; 0.0 where the label is ignored. Empty where not asked for."""
    metrics: dict[str, float]
    """What the loss reports."""
    values: list[npt.NDArray[np.float32]]
    """N arrays [T] of an adapter with a value head, as `set_loss('PPOValueLoss')` gives it; 0.0 where the label is
    ignored. Empty without one, and where `logps` are not asked for."""
    receipt: Receipt
    """What it cost."""
    next_cursor: dict[str, Any] | None
    """Of a batch by handle: the place behind it, as `DataLoader.resume_from_checkpoint` takes it; else None."""


def forward_fields(inputs: Inputs, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields `batch` and `options` that every forward verb has.

    Args:
        inputs: features or chats, one or many, or a loader's `BatchHandle`.
        options: `advantages`, `old_logps`, `ref_logps`, `loss_weights` (one entry an example);
            `temperature`, `disable_lora`, `return_logps`. `micro_batch_size` is a hint that the
            service, which packs tokens itself, has no need of.

    Raises:
        TypeError: an option is unknown.
        ValueError: names what cannot be sent.
    """
    unknown = sorted(set(options) - _OPTIONS - set(PER_LABEL))
    if unknown:
        raise TypeError(f'unknown options {unknown}; known are {sorted({*_OPTIONS, *PER_LABEL})}')
    per_label = {name: options.get(name) for name in PER_LABEL}
    return {
        'batch': _batch(inputs, per_label),
        'options': operation_pb2.ForwardOptions(
            temperature=options.get('temperature'),
            is_adapter_disabled=bool(options.get('disable_lora', False)),
            is_logprobs_returned=options.get('return_logps'),
        ),
    }


def _batch(inputs: Inputs, per_label: Mapping[str, Sequence[Any] | None]) -> operation_pb2.Batch:
    given = sorted(name for name, values in per_label.items() if values is not None)
    if isinstance(inputs, BatchHandle):
        if given:
            raise ValueError(f'{", ".join(given)}: the examples of a handle are not here; give features')
        return operation_pb2.Batch(loader=inputs.to_proto())
    inputs = [inputs] if isinstance(inputs, Mapping) else inputs
    are_chats = [
        isinstance(cast(Any, item), Mapping) and item.get('input_ids') is None and 'messages' in item for item in inputs
    ]
    if not any(are_chats):
        return operation_pb2.Batch(features=features_to_proto(inputs, per_label=per_label))
    if not all(are_chats):
        raise ValueError('inputs: give features or chats, not both in one batch')
    if given:
        raise ValueError(f'{", ".join(given)}: one number a label needs tokens; give features, not chats')
    chats = [trajectory_to_proto(item) for item in inputs]
    return operation_pb2.Batch(trajectories=operation_pb2.TrajectoryBatch(trajectories=chats))


def forward_output(result: operation_result_pb2.OperationResult) -> ForwardOutput:
    """Return what came of a forward pass."""
    forward = result.forward
    return ForwardOutput(
        loss=forward.loss,
        num_tokens=forward.label_count,
        logps=[cast(Any, tensor_from_proto(logprobs)) for logprobs in forward.logprobs],
        metrics=dict(forward.metrics),
        values=[cast(Any, tensor_from_proto(values)) for values in forward.values],
        receipt=receipt_of(result),
        next_cursor=loader_state(result.next_cursor) if result.HasField('next_cursor') else None,
    )


def log_warnings(result: operation_result_pb2.OperationResult) -> operation_result_pb2.OperationResult:
    """Log what the owner should know, and return the result."""
    for warning in result.warnings:
        _log.warning('operation %d: %s', result.sequence_number, warning)
    return result
