"""A planned training run and its cost."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from twinkle.data_format import LoraConfig
from twinkle_services.model.domain.training_config import Component


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A planned training run."""

    lora_config: LoraConfig
    full_parameters: tuple[str, ...] | None = None
    """Names of the base model's parameters to train, or an empty tuple for all of them; None for LoRA."""
    optimizer: Component
    batch_size: int
    """Number of examples."""
    sequence_tokens: int
    """Number of tokens per example."""
    label_share: float = 1.0
    """Share of tokens with a label that is not ignored, in (0, 1]."""


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """Cost of a plan on this replica."""

    parameter_count: int
    adapter_bytes: int
    """Memory of the adapter while no batch runs."""
    peak_bytes: int
    """Peak memory while a batch runs."""
    step_time: timedelta
    """Duration of one forward_backward and step without other load."""
    available_bytes: int
    """Memory that is currently available."""
    is_measured_under_load: bool = False
    """Whether other processes used the processors while the model was measured, so that `step_time` may be wrong."""

    @property
    def does_fit(self) -> bool:
        """Whether the plan fits in the available memory."""
        return self.peak_bytes <= self.available_bytes


class CostEstimator(Protocol):
    """Estimates the cost of a plan without allocating its memory."""

    async def estimate(self, plan: TrainingPlan) -> PlanCost:
        """Return the cost of a plan.

        Raises:
            InvalidField, UnknownComponent: The plan is invalid.
            BatchTooLarge: Memory ran out during a measurement.
            ReplicaLeased: The model cannot be measured while a full-parameter run uses it.
        """
        ...
