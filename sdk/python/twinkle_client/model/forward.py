"""Conversion of the inputs and outputs of forward passes."""

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
_OPTIONS = frozenset({'temperature', 'disable_lora', 'return_logps', 'return_routed_experts', 'micro_batch_size'})

Inputs = Sequence[Mapping[str, Any]] | Mapping[str, Any] | BatchHandle


class ForwardOutput(TypedDict):
    """Result of a forward pass over N examples."""

    loss: float
    """Loss of the batch, averaged or summed over labels as the loss defines; see `set_loss`."""
    num_tokens: int
    """Number of labels that are not ignored."""
    logps: list[npt.NDArray[np.float32]]
    """N arrays [T], or [T, K] for a loss with K targets per position; natural log, 0.0 where the label is ignored.
    Empty if `return_logps` is False."""
    metrics: dict[str, float]
    """Metrics of the loss by name."""
    values: list[npt.NDArray[np.float32]]
    """N arrays [T] from the value head, which `set_loss('PPOValueLoss')` adds; 0.0 where the label is ignored.
    Empty without a value head, or if `return_logps` is False."""
    routed_experts: list[npt.NDArray[np.integer[Any]]]
    """N arrays [T, layers with experts, experts per token]: the experts of each token, which the field `routed_experts`
    of a feature can replay. Empty unless `return_routed_experts` is True."""
    receipt: Receipt
    """Resources used by the operation."""
    next_cursor: dict[str, Any] | None
    """Loader state after a batch given by handle, for `DataLoader.resume_from_checkpoint`; otherwise None."""


def forward_fields(inputs: Inputs, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message fields `batch` and `options` of a forward operation.

    Args:
        inputs: One or more features or chats, or a loader's `BatchHandle`.
        options: The fields of `convert.features.PER_LABEL` with one entry per example, and `temperature`,
            `disable_lora`, `return_logps`, `return_routed_experts` and `micro_batch_size`, the maximum number of
            examples in one pass.

    Raises:
        TypeError: An option is unknown.
        ValueError: An input cannot be sent; the message names it.
    """
    unknown = sorted(set(options) - _OPTIONS - set(PER_LABEL))
    if unknown:
        raise TypeError(f'unknown options {unknown}; known options are {sorted({*_OPTIONS, *PER_LABEL})}')
    per_label = {name: options.get(name) for name in PER_LABEL}
    return {
        'batch': _batch(inputs, per_label),
        'options': operation_pb2.ForwardOptions(
            temperature=options.get('temperature'),
            is_adapter_disabled=bool(options.get('disable_lora', False)),
            is_logprobs_returned=options.get('return_logps'),
            micro_batch_size=options.get('micro_batch_size'),
            is_routed_experts_returned=bool(options.get('return_routed_experts', False)),
        ),
    }


def _batch(inputs: Inputs, per_label: Mapping[str, Sequence[Any] | None]) -> operation_pb2.Batch:
    given = sorted(name for name, values in per_label.items() if values is not None)
    if isinstance(inputs, BatchHandle):
        if given:
            raise ValueError(f'{", ".join(given)} cannot be combined with a batch handle; pass features')
        return operation_pb2.Batch(loader=inputs.to_proto())
    inputs = [inputs] if isinstance(inputs, Mapping) else inputs
    are_chats = [
        isinstance(cast(Any, item), Mapping) and item.get('input_ids') is None and 'messages' in item for item in inputs
    ]
    if not any(are_chats):
        return operation_pb2.Batch(features=features_to_proto(inputs, per_label=per_label))
    if not all(are_chats):
        raise ValueError('inputs: a batch must contain features or chats, not both')
    if given:
        raise ValueError(f'{", ".join(given)}: values per label need tokens; pass features, not chats')
    chats = [trajectory_to_proto(item) for item in inputs]
    return operation_pb2.Batch(trajectories=operation_pb2.TrajectoryBatch(trajectories=chats))


def forward_output(result: operation_result_pb2.OperationResult) -> ForwardOutput:
    """Return the output of a forward operation."""
    forward = result.forward
    return ForwardOutput(
        loss=forward.loss,
        num_tokens=forward.label_count,
        logps=[cast(Any, tensor_from_proto(logprobs)) for logprobs in forward.logprobs],
        metrics=dict(forward.metrics),
        values=[cast(Any, tensor_from_proto(values)) for values in forward.values],
        routed_experts=[tensor_from_proto(experts) for experts in forward.routed_experts],
        receipt=receipt_of(result),
        next_cursor=loader_state(result.next_cursor) if result.HasField('next_cursor') else None,
    )


def log_warnings(result: operation_result_pb2.OperationResult) -> operation_result_pb2.OperationResult:
    """Log the warnings of a result and return the result."""
    for warning in result.warnings:
        _log.warning('operation %d: %s', result.sequence_number, warning)
    return result
