"""What comes of operations."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from services.model.domain.loader_batch import LoaderCursor
from twinkle.data_format import ForwardResult, StepResult


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
