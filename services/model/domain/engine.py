"""Values exchanged with the engine: descriptions and states of adapters, and results of verbs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from twinkle.data_format import LoraConfig, TensorData
from twinkle_services.model.domain.operation import BatchVerb
from twinkle_services.model.domain.result import Outcome
from twinkle_services.model.domain.training_config import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class AdapterDescription:
    """Configuration of an adapter as the engine created it."""

    lora_config: LoraConfig
    """Configuration with all defaults and the seed; not used for full-parameter training."""
    training_config: TrainingConfig
    """Configuration with all defaults."""
    parameter_count: int
    warnings: tuple[str, ...] = ()
    """Messages about parts of the configuration that have no effect, or an unexpected effect."""


@dataclass(frozen=True, kw_only=True)
class AdapterState:
    """An adapter's weights and, optionally, the state that its trainer needs to resume."""

    lora_config: LoraConfig
    """Not used if `full_parameters` is set."""
    adapter: Mapping[str, TensorData]
    """Tensors by peft's parameter names, or by the base model's names for full-parameter training."""
    full_parameters: tuple[str, ...] | None = None
    """Names that select the base model's parameters, or an empty tuple for all of them; None for LoRA."""
    trainer: Mapping[str, TensorData] = field(default_factory=dict[str, TensorData])
    """Optimizer, schedule, counters and random state; empty if not requested."""
    step_count: int = 0
    left_out: tuple[str, ...] = ()
    """Parts of the adapter that this state lacks: a value head is stored only with the trainer's state."""


@dataclass(frozen=True, kw_only=True)
class VerbRun:
    """Result of one verb on the engine."""

    outcome: Outcome
    device_seconds: float = 0.0
    wait_seconds: float = 0.0
    """Time from the submission of the verb to its start, in seconds; set by the dispatcher."""
    padding_token_count: int = 0
    pass_count: int = 0
    """Number of passes through the model that included this verb."""
    pass_adapter_count: int = 0
    """Maximum number of adapters that shared one of these passes, including this adapter."""
    shared_token_count: int = 0
    """Number of tokens whose results were taken from an equal prefix of another sequence in the same pass."""
    training_config: TrainingConfig | None = None
    """Configuration in use after the verb; None if the verb did not change it."""
    step_count: int | None = None
    """Number of optimizer steps applied in total; None if the verb leaves this number unchanged."""
    warnings: tuple[str, ...] = ()
    is_divided: bool = False
    """True if memory ran out and the batch ran in smaller parts. A replay of the verb may then give slightly different
    floating-point results."""


@dataclass(frozen=True)
class UnfinishedVerb:
    """A verb that has begun and needs more passes. The adapter does not change before the last one."""

    remaining_token_count: int


@dataclass(frozen=True, kw_only=True)
class BatchPart:
    """One adapter's part of a pass."""

    adapter_id: str
    verb: BatchVerb | None
    """None to continue the adapter's unfinished verb."""
