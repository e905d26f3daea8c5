"""Arguments and results of engine methods.

Legend: T tokens of a feature, D hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from twinkle.data_format import ForwardResult, InputFeature
from twinkle.loss import Loss
from twinkle.model.errors import InvalidArgument

MORE_OUTPUTS = ('embeddings', 'entropies', 'logits', 'routed_experts', 'values')
"""Outputs that a batch may return in addition to log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class ForwardOptions:
    """Options of a forward pass."""

    temperature: float = 1.0
    """Divisor of the logits before log-probabilities are computed; positive and finite."""
    is_adapter_disabled: bool = False
    """Whether to run the base model without the adapter; only for forward_only."""
    are_weightless_labels_kept: bool = False
    """Whether to also return the log-probabilities of labels of weight 0, which the head otherwise skips."""
    more_outputs: tuple[str, ...] = ()
    """Names from `MORE_OUTPUTS` to return. 'logits' need memory for every label and token id."""
    micro_batch_size: int | None = None
    """Maximum number of examples of the batch in one pass, at least 1. None limits only the rows of a pass. Groups of a
    loss, such as the pairs of DPO, stay together even if a group is larger."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.more_outputs) - set(MORE_OUTPUTS))
        if unknown:
            raise InvalidArgument(f'unknown outputs {unknown}; use {sorted(MORE_OUTPUTS)}')
        if not 0.0 < self.temperature < float('inf'):
            raise InvalidArgument(f'temperature must be positive and finite, got {self.temperature}')
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise InvalidArgument(f'micro_batch_size must be at least 1, got {self.micro_batch_size}')


@dataclass(frozen=True, kw_only=True)
class BatchItem:
    """One adapter's part of a joint batch."""

    adapter_id: str
    features: Sequence[InputFeature]
    """Features of the batch, at least one; not modified."""
    options: ForwardOptions = field(default_factory=ForwardOptions)
    is_training: bool
    """True runs the batch like forward_backward, which accumulates the gradient; False runs it like forward_only."""
    loss: Loss | None = None
    """Loss of this batch only; None for the adapter's loss."""


@dataclass(frozen=True, kw_only=True)
class BatchResult(ForwardResult):
    """Forward result with its cost, and with outputs that are only returned in process."""

    loss_sum: float
    """Loss as a sum over labels."""
    outputs: Mapping[str, Sequence[npt.NDArray[Any]]] = field(default_factory=dict)
    """Requested outputs except `values`, one array per feature: `embeddings` [D], `entropies` [T], `logits` [T, V]
    divided by the temperature; 0.0 at ignored labels. `routed_experts` [T, layers, experts per token] are integers."""
    token_count: int
    """Number of tokens of the batch."""
    padding_token_count: int = 0
    """Number of rows that were added because kernels require them."""
    shared_token_count: int = 0
    """Number of tokens whose results were taken from an equal prefix of another sequence in the same pass."""
    pass_count: int = 1
    """Number of passes with a part of the batch."""
    pass_adapter_count: int = 1
    """Maximum number of adapters in one of these passes."""
    device_seconds: float = 0.0
    """The adapter's share of the durations of these passes, by rows."""
    is_divided: bool = False
    """Whether the batch ran in smaller pieces because memory ran out. With more memory, the last bits of its gradient
    may differ, so a replay of the batch may give other weights."""
    warnings: tuple[str, ...] = ()
    """Messages for the adapter's owner, such as streams that the loss does not read."""


@dataclass(frozen=True, kw_only=True)
class ClipOptions:
    """Limits of a gradient."""

    max_grad_norm: float = 1.0
    """Maximum norm of the whole gradient; positive. Infinity measures the norm without clipping."""
    norm_type: float = 2.0
    """p of the p-norm, at least 1."""
    max_grad_value: float | None = None
    """Maximum magnitude of each element, applied before the norm; positive. None disables it."""

    def __post_init__(self) -> None:
        if not self.max_grad_norm > 0.0:
            raise InvalidArgument(f'max_grad_norm must be positive, got {self.max_grad_norm}')
        if not self.norm_type >= 1.0:
            raise InvalidArgument(f'norm_type must be at least 1, got {self.norm_type}')
        if self.max_grad_value is not None and not self.max_grad_value > 0.0:
            raise InvalidArgument(f'max_grad_value must be positive, got {self.max_grad_value}')


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Changes for one step only."""

    learning_rate: float | None = None
    """Learning rate; None uses the current rate of each parameter group."""
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the optimizer by name, such as `betas`; its state is preserved."""
