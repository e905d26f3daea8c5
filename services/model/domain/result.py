"""What comes of operations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import numpy.typing as npt

from services.model.domain.loader_batch import LoaderCursor


@dataclass(frozen=True, kw_only=True)
class ForwardResult:
    """Of the forward family."""

    loss: float
    label_count: int
    logprobs: Sequence[npt.NDArray[np.float32]] = ()
    """float32 [T] for each example, natural, 0.0 where the label is ignored; [T, K] where the loss has K targets."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    values: Sequence[npt.NDArray[np.float32]] = ()
    """float32 [T] for each example, 0.0 where the label is ignored; of adapters with a value head alone."""


@dataclass(frozen=True, kw_only=True)
class LayerHealth:
    """How a layer took a step. Norms are Euclidean."""

    path: str
    grad_norm: float
    """Of the gradient divided as for the step, before clipping."""
    weight_norm: float
    """Before the step."""
    update_to_weight_ratio: float
    non_finite_location: str = ''
    """First element that is infinite or not a number; empty where all are finite."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Of the step family and of Undo."""

    is_applied: bool
    learning_rate: float
    step_count: int
    grad_norm: float | None = None
    layers: tuple[LayerHealth, ...] = ()
    """In the model's order; empty unless asked for."""


@dataclass(frozen=True, kw_only=True)
class MetricResult:
    """Of CalculateMetric."""

    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """Of Save."""

    checkpoint_path: str
    size_bytes: int
    folder: str = ''


@dataclass(frozen=True, kw_only=True)
class PublishResult:
    """Of PublishVersion."""

    version: int
    digest: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """Of Load."""

    step_count: int
    consumed_train_samples: int | None = None
    """The data cursor as saved; None where none was, or the weights alone were loaded."""
    gradient_accumulation_steps: int | None = None
    """As saved; None where the weights alone were loaded."""


Outcome = ForwardResult | StepResult | MetricResult | SaveResult | PublishResult | LoadResult | None


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What an operation cost."""

    token_count: int = 0
    padding_token_count: int = 0
    device_time: timedelta = timedelta()
    queue_time: timedelta = timedelta()
    request_bytes: int = 0
    pass_count: int = 0
    """Passes of the model it took part in."""
    pass_adapter_count: int = 0
    """Adapters that shared the fullest of them, this one included."""


@dataclass(frozen=True, kw_only=True)
class OperationResult:
    """An operation that was carried out."""

    adapter_id: str
    sequence_number: int
    outcome: Outcome
    receipt: Receipt
    warnings: tuple[str, ...] = ()
    is_replayed: bool = False
    next_cursor: LoaderCursor | None = None
    """The position after its batch, where that was a loader's."""
