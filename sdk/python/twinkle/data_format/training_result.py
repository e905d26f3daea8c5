"""Results of training operations, shared by the trainer engine and the model service. Arrays are NumPy arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class ForwardResult:
    """Result of a forward pass over N features, with or without a gradient."""

    loss: float
    """The loss with the scaling of the optimizer step: the summed loss, divided by the sum of `LossOutput.num_tokens`
    unless that is 0."""
    num_tokens: int
    """Number of labels that count."""
    logps: Sequence[npt.NDArray[np.float32]] = ()
    """N arrays, float32 [T]: natural log-probability of each label, 0.0 where it is ignored; [T, K] if the loss has K
    targets per position. Empty if the caller did not request them."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Values that the loss reports, by name."""
    values: Sequence[npt.NDArray[np.float32]] = ()
    """N arrays, float32 [T]: outputs of the value head, 0.0 where the label is ignored. Empty without a value head."""
    routed_experts: Sequence[npt.NDArray[np.integer[Any]]] = ()
    """N arrays, integers [T, layers with experts, experts per token]: experts of each token. Empty unless requested
    from a service. In process, `BatchResult.outputs` contains them."""


@dataclass(frozen=True, kw_only=True)
class LayerHealth:
    """Norms of one layer at an optimizer step. Norms are Euclidean, over all tensors of the layer together."""

    path: str
    """Path of the layer in the base model."""
    grad_norm: float
    """Norm of the gradient with the scaling of the step, before clipping. If it is infinite or NaN,
    `non_finite_location` names the element."""
    weight_norm: float
    """Norm of the weights before the step."""
    relative_update: float
    """Norm of the change divided by `weight_norm`; 0.0 if nothing changed, infinite if only `weight_norm` is 0."""
    non_finite_location: str = ''
    """First element that is infinite or NaN, such as 'lora_B[3, 7] of the gradient'; empty without such an element."""

    @property
    def update_to_weight_ratio(self) -> float:
        """Deprecated alias of `relative_update`."""
        return self.relative_update


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of an operation that clips, applies or schedules an optimizer step."""

    is_applied: bool
    """False if the call only counted towards gradient accumulation."""
    grad_norm: float | None = None
    """Norm of the gradient before clipping; None if it was not computed."""
    learning_rate: float
    """Learning rate of the optimizer step that was applied, or else of the next step."""
    step_count: int
    """Number of optimizer steps applied so far."""
    layers: Sequence[LayerHealth] = ()
    """Health of each layer, in the model's order; empty unless requested."""

    @property
    def health(self) -> Sequence[LayerHealth]:
        """Deprecated alias of `layers`."""
        return self.layers
