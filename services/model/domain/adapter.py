"""An adapter: its owner, configuration and progress."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from services.model.domain.training_config import TrainingConfig
from twinkle.data_format import LoraConfig


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
    """Names of the base model's parameters that it trains, or an empty tuple for all of them; None for LoRA."""
    has_lease: bool = False
    """Whether it has the lease of the replica, which a full-parameter adapter needs to be in the engine."""
    create_time: datetime
    update_time: datetime
    sequence_number: int = 0
    """Number of the last accepted operation; 0 before the first."""
    step_count: int = 0
    """Number of optimizer steps applied."""
    trained_token_count: int = 0
    """Number of tokens processed since its creation, including operations that were undone."""
    version: int = 0
    """Newest published version; 0 before the first."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    session_id: str = ''
    """Session in which it was created; empty without a session."""
    checkpoint_path: str = ''
    """Checkpoint that contains the current weights; empty if there is no such checkpoint."""

    @property
    def is_full_parameter(self) -> bool:
        """Whether it trains the base model's parameters."""
        return self.full_parameters is not None

    @property
    def is_unsaved(self) -> bool:
        """Whether it has steps that no checkpoint contains."""
        return self.step_count > 0 and not self.checkpoint_path
