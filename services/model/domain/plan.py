"""What a training run would be, and what it would cost."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from services.model.domain.training_config import Component
from twinkle.data_format import LoraConfig


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A run that may never be made."""

    lora_config: LoraConfig
    full_parameters: tuple[str, ...] | None = None
    """Names of base parameters to train, empty for all of them; None to train an adapter."""
    optimizer: Component
    batch_size: int
    """Examples."""
    sequence_tokens: int
    """Tokens of each."""
    label_share: float = 1.0
    """Share of the tokens whose label counts, in (0, 1]."""


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """What a plan would cost on this replica."""

    parameter_count: int
    adapter_bytes: int
    """At rest."""
    peak_bytes: int
    """Most while a batch runs."""
    step_time: timedelta
    """Of one forward_backward and step, alone on the replica."""
    available_bytes: int
    """Free for it now."""

    @property
    def does_fit(self) -> bool:
        """Whether it fits beside what is there now."""
        return self.peak_bytes <= self.available_bytes


class CostEstimator(Protocol):
    """Says what a training plan would cost, before anything is allocated. A port."""

    async def estimate(self, plan: TrainingPlan) -> PlanCost:
        """Return what a plan would cost.

        Raises:
            InvalidField, UnknownComponent: a part of the plan is of no use.
        """
        ...
