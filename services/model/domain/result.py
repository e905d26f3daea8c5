"""Results of operations. The results of forward passes and steps are in `twinkle.data_format`.

The messages of the same names in `twinkle.api.model.v1` document the fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from twinkle.data_format import ForwardResult, StepResult
from twinkle_services.model.domain.loader_batch import LoaderCursor


@dataclass(frozen=True, kw_only=True)
class MetricResult:
    """Result of CalculateMetric."""

    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """Result of Save and ExportMerged."""

    checkpoint_path: str
    """Path of the checkpoint; empty for ExportMerged."""
    size_bytes: int
    folder: str = ''


@dataclass(frozen=True, kw_only=True)
class PublishResult:
    """Result of PublishVersion."""

    version: int
    digest: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """Result of Load."""

    step_count: int
    consumed_train_samples: int | None = None
    """The saved data cursor; None if the checkpoint has no cursor, or only the weights were loaded."""
    gradient_accumulation_steps: int | None = None
    """The saved number of accumulation steps; None if only the weights were loaded."""


Outcome = ForwardResult | StepResult | MetricResult | SaveResult | PublishResult | LoadResult | None


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Cost of an operation."""

    token_count: int = 0
    padding_token_count: int = 0
    device_time: timedelta = timedelta()
    queue_time: timedelta = timedelta()
    request_bytes: int = 0
    pass_count: int = 0
    """Number of passes through the model that included the operation."""
    pass_adapter_count: int = 0
    """Maximum number of adapters that shared one of these passes, including the operation's adapter."""
    shared_token_count: int = 0
    """Number of tokens whose results were taken from an equal prefix of another sequence in the same pass."""


@dataclass(frozen=True, kw_only=True)
class OperationResult:
    """Result of an executed operation."""

    adapter_id: str
    sequence_number: int
    outcome: Outcome
    receipt: Receipt
    warnings: tuple[str, ...] = ()
    is_replayed: bool = False
    """Whether this result was recorded by an earlier run of the operation."""
    next_cursor: LoaderCursor | None = None
    """The position after the operation's batch, if the batch came from a loader."""
