"""An adapter with its tenant, configuration and progress, and the records that remain after its removal."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from twinkle.data_format import LoraConfig
from twinkle_services.model.domain.step_metrics import StepMetrics
from twinkle_services.model.domain.training_config import TrainingConfig

MAX_EXPIRED = 16384
"""Maximum number of stored records of expired adapters; older ones are deleted."""
MAX_CREATIONS = 4096
"""Maximum number of creation requests stored to recognize repeats."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One training run. Immutable; changes create new values."""

    adapter_id: str
    tenant_id: str
    base_model: str
    lora_config: LoraConfig
    """Configuration in use, including all defaults and the seed."""
    training_config: TrainingConfig
    """Configuration in use."""
    parameter_count: int
    full_parameters: tuple[str, ...] | None = None
    """Names of the base model's parameters to train, or an empty tuple for all of them; None for LoRA."""
    has_lease: bool = False
    """Whether the adapter has the lease of the replica, which a full-parameter adapter needs to be in the engine."""
    create_time: datetime
    update_time: datetime
    sequence_number: int = 0
    """Number of the last executed operation; 0 before the first."""
    step_count: int = 0
    """Number of optimizer steps applied."""
    trained_token_count: int = 0
    """Number of tokens of successful operations since the adapter's creation, including operations that were undone."""
    version: int = 0
    """Newest published version; 0 before the first."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    session_id: str = ''
    """Session in which the adapter was created; empty without a session."""
    checkpoint_path: str = ''
    """Checkpoint with the current weights: the one used by the creation or by the last load, or the last one saved with
    the optimizer and without an expiry. Empty if there is no such checkpoint, or if a step or an undo followed it."""
    session_end_time: datetime | None = None
    """Time of the last request to park the adapter because its session had ended; None before the first request."""
    metrics: StepMetrics = field(default_factory=StepMetrics)
    """Metrics that the gateway stores, and totals of the current step."""

    @property
    def is_full_parameter(self) -> bool:
        """Whether the adapter trains the base model's parameters."""
        return self.full_parameters is not None

    @property
    def is_unsaved(self) -> bool:
        """Whether the adapter applied steps, and its current weights are in no known checkpoint."""
        return self.step_count > 0 and not self.checkpoint_path

    @property
    def is_session_over(self) -> bool:
        """Whether the adapter's session has ended and no operation followed."""
        return self.session_end_time is not None and self.session_end_time >= self.update_time

    @property
    def last_use_time(self) -> datetime | None:
        """The later time of the last operation and the end of the session; None until the session has ended.

        An adapter without a session is treated as if its session had ended.
        """
        if self.session_end_time is None:
            return None if self.session_id else self.update_time
        return max(self.session_end_time, self.update_time)


@dataclass(frozen=True, kw_only=True)
class ExpiredAdapter:
    """An adapter that was removed because it was not used for a long time."""

    adapter_id: str
    tenant_id: str
    checkpoint_path: str
    """Checkpoint with the trained state; empty if the adapter was not trained."""


@dataclass(frozen=True, kw_only=True)
class CreationRecord:
    """The request that created an adapter, so that a repeated request returns the same adapter."""

    tenant_id: str
    request_id: str
    fingerprint: str
    adapter_id: str
