"""An adapter as the service knows it: whose it is, how it is trained, how far it came."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from services.model.domain.training_config import TrainingConfig
from twinkle.data_format import LoraConfig


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One training run. Immutable: a change makes a new value."""

    adapter_id: str
    tenant_id: str
    base_model: str
    lora_config: LoraConfig
    """As in use: every default filled in, the seed included."""
    training_config: TrainingConfig
    """As in use."""
    parameter_count: int
    full_parameters: tuple[str, ...] | None = None
    """Names of the base model's own parameters that it trains, empty for all, as it has leased the replica.
    None: LoRA."""
    create_time: datetime
    update_time: datetime
    sequence_number: int = 0
    """The last operation that was accepted; 0 before the first."""
    step_count: int = 0
    """Optimizer steps applied."""
    trained_token_count: int = 0
    """Tokens computed for its operations since it was made, also for those that were undone."""
    version: int = 0
    """The newest published version; 0 before the first."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    session_id: str = ''
    """The session it was made in, as its creator named it."""
    checkpoint_path: str = ''
    """A checkpoint that its weights can be had from again; empty: none."""

    @property
    def is_full_parameter(self) -> bool:
        """Whether it trains the base model itself."""
        return self.full_parameters is not None

    @property
    def is_unsaved(self) -> bool:
        """Whether it has steps that no checkpoint has."""
        return self.step_count > 0 and not self.checkpoint_path
