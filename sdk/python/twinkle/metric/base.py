"""The seam between the trainer and a metric."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinkle.data_format import InputFeature


@dataclass(frozen=True, kw_only=True)
class ForwardFacts:
    """What came of one batch."""

    features: Sequence[InputFeature]
    """The batch; only read."""
    loss_sum: float
    """The loss as a sum."""
    label_count: int
    """Labels that counted."""
    token_count: int
    """Tokens computed."""
    loss_metrics: Mapping[str, float]
    """What the loss itself reports."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What came of one optimizer step."""

    learning_rate: float
    step_count: int
    """Steps applied so far, this one included."""
    grad_norm: float | None
    """Norm before clipping; None where it was not computed."""


class Metric(ABC):
    """Gathers facts and reports numbers. One instance belongs to one adapter."""

    @abstractmethod
    def accumulate(self, facts: ForwardFacts) -> None:
        """Take in a batch."""

    def accumulate_step(self, facts: StepFacts) -> None:  # noqa: B027 - a metric of losses alone need not care
        """Take in an optimizer step."""

    @abstractmethod
    def calculate(self) -> dict[str, float]:
        """Return numbers by name; names say their unit. Empty where nothing was gathered."""

    @abstractmethod
    def reset(self) -> None:
        """Begin anew."""
