"""What goes into the verbs of the trainer and what comes out of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.data_format import ForwardResult, InputFeature
from twinkle.loss import Loss
from twinkle.model.errors import InvalidArgument

MORE_OUTPUTS = ('embeddings', 'entropies', 'logits', 'values')
"""What a batch may return beside log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class ForwardOptions:
    """How a forward pass is run."""

    temperature: float = 1.0
    """Divides the logits before the log-probabilities; positive and finite."""
    is_adapter_disabled: bool = False
    """Run the base model without the adapter; forward_only alone."""
    are_weightless_labels_kept: bool = False
    """Give the log-probabilities of labels of weight 0 too; without, the head does not run on them."""
    more_outputs: tuple[str, ...] = ()
    """Those of `MORE_OUTPUTS` to return beside the log-probabilities. 'logits' take memory for every label and id."""

    def __post_init__(self) -> None:
        """Refuse a temperature no logits could be divided by, and outputs there are not."""
        unknown = sorted(set(self.more_outputs) - set(MORE_OUTPUTS))
        if unknown:
            raise InvalidArgument(f'there are no outputs {unknown}; there are {sorted(MORE_OUTPUTS)}')
        if not 0.0 < self.temperature < float('inf'):
            raise InvalidArgument(f'temperature must be positive and finite, got {self.temperature}')


@dataclass(frozen=True, kw_only=True)
class BatchItem:
    """One adapter's share of a joint batch."""

    adapter_id: str
    features: Sequence[InputFeature]
    """At least one; only read."""
    options: ForwardOptions = field(default_factory=ForwardOptions)
    is_training: bool
    """Whether the loss's gradient is added to the adapter's, as forward_backward does; else as forward_only."""
    loss: Loss | None = None
    """Of this batch alone; None for the adapter's."""


@dataclass(frozen=True, kw_only=True)
class BatchResult(ForwardResult):
    """A forward result together with what it cost and what only this process returns."""

    loss_sum: float
    """The loss as a sum over labels."""
    outputs: Mapping[str, Sequence[npt.NDArray[np.float32]]] = field(default_factory=dict)
    """The requested outputs other than `values`, one array per feature: `embeddings` [D], `entropies` [T], `logits`
    [T, V], divided by the temperature; 0.0 at labels that do not count."""
    token_count: int
    """Tokens computed."""
    padding_token_count: int = 0
    """Rows computed beside them because a kernel wants more."""
    pass_count: int = 1
    """Passes through the model that held a part of the batch."""
    pass_adapter_count: int = 1
    """Adapters in the widest of these passes."""
    device_seconds: float = 0.0
    """Time of these passes, each shared among its adapters by their tokens."""
    is_divided: bool = False
    """Whether memory ran out and the batch ran in smaller pieces than its own: run again with more memory, its
    gradient may differ in the last bits, so a replay must not cross it."""
    warnings: tuple[str, ...] = ()
    """What the owner should know of, such as streams the loss did not read."""


@dataclass(frozen=True, kw_only=True)
class ClipOptions:
    """How a gradient is limited."""

    max_grad_norm: float = 1.0
    """Of the whole gradient; positive, infinity only measures."""
    norm_type: float = 2.0
    """The p of the p-norm, at least 1."""
    max_grad_value: float | None = None
    """Of each element, before the norm is taken; positive. None: not limited."""

    def __post_init__(self) -> None:
        """Refuse limits that are none."""
        if not self.max_grad_norm > 0.0:
            raise InvalidArgument(f'max_grad_norm must be positive, got {self.max_grad_norm}')
        if not self.norm_type >= 1.0:
            raise InvalidArgument(f'norm_type must be at least 1, got {self.norm_type}')
        if self.max_grad_value is not None and not self.max_grad_value > 0.0:
            raise InvalidArgument(f'max_grad_value must be positive, got {self.max_grad_value}')


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What differs for one step alone."""

    learning_rate: float | None = None
    """Unset: as the schedule says."""
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the optimizer by name, such as `betas`; its state goes on."""
