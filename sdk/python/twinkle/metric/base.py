"""The seam between the trainer and a metric.

Legend: R labels that count, F features, D hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from twinkle.data_format import InputFeature

Floats = npt.NDArray[np.float32]

FACT_NAMES = ('embeddings', 'entropies', 'is_greedy', 'values')
"""What a metric may ask of the forward pass beside the labels' log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class LabelFacts:
    """What came of each label that counts, in the order of the batch; all parts of a split batch together."""

    logps_R: Floats
    """Natural log-probability of each label."""
    features_R: npt.NDArray[np.int64]
    """Rising: index within the batch of the feature each label belongs to."""
    streams: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict[str, Any])
    """[R] or [R, K] by name: what the features carried."""
    entropies_R: Floats | None = None
    """Entropy in nats of the distribution each label is drawn from."""
    is_greedy_R: npt.NDArray[np.bool_] | None = None
    """Whether the label is the likeliest id."""
    values_R: Floats | None = None
    """The value head at the row that predicts each label."""
    embeddings_FD: Floats | None = None
    """Hidden state after the final norm at each feature's last token."""


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
    labels: LabelFacts | None = None
    """Label by label; None where the trainer keeps no such facts, and metrics that need them report nothing."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What came of one optimizer step."""

    learning_rate: float
    step_count: int
    """Steps applied so far, this one included."""
    grad_norm: float | None
    """Norm before clipping; None where it was not computed."""


MetricState = dict[str, float | int | list[float]]
"""What a metric has gathered, as JSON can hold it."""


class Metric(ABC):
    """Gathers facts and reports numbers. One instance belongs to one adapter.

    What is gathered is a function of the facts alone, so that a trainer that replays a batch gathers
    the same bits; only values in `wall_clock_values` depend on when and where.
    """

    units: ClassVar[Mapping[str, str]] = {}
    """Value to its unit, such as 'tokens/s', 'nats', or 'ratio' for shares in [0, 1]."""
    required_outputs: ClassVar[tuple[str, ...]] = ()
    """Those of `FACT_NAMES` without which there is nothing to report."""
    optional_streams: ClassVar[tuple[str, ...]] = ()
    """Streams read where every feature of the batch carries them."""
    wall_clock_values: ClassVar[frozenset[str]] = frozenset()
    """Values that differ from run to run. Time in which no process held the metric does not count."""

    @abstractmethod
    def accumulate(self, facts: ForwardFacts) -> None:
        """Take in a batch."""

    def accumulate_step(self, facts: StepFacts) -> None:  # noqa: B027 - a metric of losses alone need not care
        """Take in an optimizer step."""

    @abstractmethod
    def calculate(self) -> dict[str, float]:
        """Return numbers by name. Empty where nothing was gathered."""

    @abstractmethod
    def reset(self) -> None:
        """Begin anew."""

    @abstractmethod
    def state(self) -> MetricState:
        """Return what was gathered, to be kept and given to `load_state`; after JSON it is the same to the bit."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what an instance with the same options had gathered.

        Raises:
            ValueError: it is no state of such a metric; nothing was changed.
        """
