"""What the application needs of the world: an engine that trains, and somewhere to put weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from services.kit.server_facts import ServerFacts
from services.model.domain.operation import ComputeVerb, Save
from services.model.domain.result import Outcome, PublishResult, SaveResult
from services.model.domain.training_config import TrainingConfig
from twinkle.data_format import LoraConfig, TensorData


@dataclass(frozen=True, kw_only=True)
class AdapterDescription:
    """An adapter as the engine made it."""

    lora_config: LoraConfig
    """Every default filled in, the seed included."""
    training_config: TrainingConfig
    """Every default filled in."""
    parameter_count: int


@dataclass(frozen=True, kw_only=True)
class AdapterState:
    """An adapter's weights, and what its trainer needs to resume."""

    lora_config: LoraConfig
    adapter: Mapping[str, TensorData]
    """By peft's names."""
    trainer: Mapping[str, TensorData] = field(default_factory=dict[str, TensorData])
    """Optimizer, schedule, counters, random state; empty where not asked for."""
    step_count: int = 0


@dataclass(frozen=True, kw_only=True)
class VerbRun:
    """A verb that the engine carried out."""

    outcome: Outcome
    device_seconds: float = 0.0
    padding_token_count: int = 0
    training_config: TrainingConfig | None = None
    """As in use now, where the verb changed it."""
    step_count: int | None = None
    """Optimizer steps applied so far, where the verb may have changed it."""
    warnings: tuple[str, ...] = ()


class TrainerBackend(Protocol):
    """Trains adapters on one base model. Contract suite: tests/contract/model.

    Every refusal of the InvalidArgument family is raised before any state changes.
    """

    def facts(self) -> ServerFacts:
        """Return the base model, the components known by name, and limits. Cheap."""
        ...

    async def create_adapter(
        self, adapter_id: str, lora_config: LoraConfig, training_config: TrainingConfig
    ) -> AdapterDescription:
        """Make an adapter with fresh weights.

        Raises:
            InvalidField, UnknownComponent: a part of the configuration is of no use; fields are named
                from `lora_config` or `training_config`.
        """
        ...

    async def delete_adapter(self, adapter_id: str) -> None:
        """Free an adapter; one that is not there is no error."""
        ...

    async def run(self, adapter_id: str, verb: ComputeVerb) -> VerbRun:
        """Carry out a verb.

        Raises:
            InvalidField, UnknownComponent, BatchTooLarge: refused; nothing changed. Fields are named
                from the verb, such as `features[2].labels` or `training_config.optimizer`.
            AdapterNotReady, LossNotFinite: it could not be done; gradients and weights are as before.
        """
        ...

    async def export_state(self, adapter_id: str, *, is_trainer_included: bool) -> AdapterState:
        """Return a copy of the adapter's weights and, if asked, its trainer's state."""
        ...

    async def import_state(self, adapter_id: str, state: AdapterState, *, is_trainer_included: bool) -> VerbRun:
        """Replace the adapter's weights and, if asked, its trainer's state; all of it or nothing.

        Raises:
            InvalidField: the state is of another shape than the adapter, or lacks the trainer's part.
        """
        ...

    async def close(self) -> None:
        """Free everything."""
        ...


class WeightStore(Protocol):
    """Keeps versions and checkpoints; acts for the current caller."""

    async def publish_version(
        self, adapter_id: str, state: AdapterState, *, base_model: str, version: int, is_pinned: bool
    ) -> PublishResult:
        """Make `state` a version; the same version with the same state again is harmless.

        Raises:
            DomainError: as the contract of Publish says.
        """
        ...

    async def save(self, adapter_id: str, state: AdapterState, *, base_model: str, save: Save) -> SaveResult:
        """Make `state` a durable checkpoint.

        Raises:
            DomainError: as the contract of Publish says.
        """
        ...

    async def fetch(self, checkpoint_path: str, *, is_trainer_included: bool) -> AdapterState:
        """Return a checkpoint's state.

        Raises:
            CheckpointNotFound, ServiceUnreachable: it cannot be had.
        """
        ...
