"""Interface between the training engine and a metric.

Legend: R labels, K columns of a wide stream, F features, D hidden size.
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
"""Outputs of the forward pass that a metric may request in addition to the labels' log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class LabelFacts:
    """Results for the labels of a batch, in order; the parts of a split batch are joined.

    Labels of weight 0 are included only if their log-probabilities were computed.
    """

    logps_R: Floats
    """Natural log-probability of each label."""
    features_R: npt.NDArray[np.int64]
    """Index of each label's feature in the batch, ascending."""
    streams: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict[str, Any])
    """[R] or [R, K]: streams of the features by name."""
    entropies_R: Floats | None = None
    """Entropy, in nats, of the distribution that predicts each label."""
    is_greedy_R: npt.NDArray[np.bool_] | None = None
    """Whether the label is the most likely token."""
    values_R: Floats | None = None
    """Output of the value head at the row that predicts each label."""
    embeddings_FD: Floats | None = None
    """Hidden state after the final norm at each feature's last token."""


@dataclass(frozen=True, kw_only=True)
class ForwardFacts:
    """Results of one batch."""

    features: Sequence[InputFeature]
    """Features of the batch; must not be modified."""
    loss_sum: float
    """Loss of the batch, as a sum."""
    label_count: int
    """Number of labels that are not ignored and whose weight is not 0."""
    token_count: int
    """Number of tokens of the batch, without masked tokens."""
    loss_metrics: Mapping[str, float]
    """Metrics that the loss reported."""
    labels: LabelFacts | None = None
    """Results per label, or None if they were not collected; metrics that need them then report nothing."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Results of one optimizer step."""

    learning_rate: float
    step_count: int
    """Number of applied steps, including this step."""
    grad_norm: float | None
    """Norm before clipping, or None if it was not computed."""


MetricState = dict[str, float | int | list[float]]
"""JSON-compatible state of a metric."""


class Metric(ABC):
    """Accumulator that reports numbers. One instance belongs to one adapter.

    Its state depends only on the accumulated results, so replaying a batch gives bitwise the same state; only the
    values in `wall_clock_values` depend on time.
    """

    units: ClassVar[Mapping[str, str]] = {}
    """Unit of each value, such as 'tokens/s', 'nats', or 'ratio' for fractions in [0, 1]."""
    required_outputs: ClassVar[tuple[str, ...]] = ()
    """Names from `FACT_NAMES` that the metric requests."""
    optional_streams: ClassVar[tuple[str, ...]] = ()
    """Streams that the metric reads if every feature of the batch has them."""
    wall_clock_values: ClassVar[frozenset[str]] = frozenset()
    """Values that differ between runs. Time during which no process has the metric loaded is not counted."""

    @abstractmethod
    def accumulate(self, facts: ForwardFacts) -> None:
        """Add the results of a batch."""

    def accumulate_step(self, facts: StepFacts) -> None:  # noqa: B027 - most metrics ignore steps
        """Add the results of an optimizer step."""

    @abstractmethod
    def calculate(self) -> dict[str, float]:
        """Return the values by name, without values for which nothing was accumulated."""

    @abstractmethod
    def reset(self) -> None:
        """Clear the accumulated results."""

    @abstractmethod
    def state(self) -> MetricState:
        """Return the state for `load_state`; a JSON round trip preserves it bitwise."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of an instance with the same options.

        Raises:
            ValueError: the state is invalid for this metric; nothing was changed.
        """
