"""Facts that a service reports about itself. `kit.rpc.server_info` converts them to messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any


@dataclass(frozen=True, kw_only=True)
class BaseModelFacts:
    """A base model of a service."""

    base_model: str
    context_tokens: int
    """Maximum number of tokens of a sequence, including prompt and completion."""
    vocabulary_size: int
    parameter_count: int
    dtype: str
    is_trainable: bool = False
    is_sampleable: bool = False
    patches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Options of the applied patches, by name, in the order of application."""
    tool_call_format: str = ''
    """Name of the format in which the chat template writes tool calls; empty if it does not render tools."""


@dataclass(frozen=True, kw_only=True)
class TrainerFacts:
    """State of a model service that a gateway considers when it assigns runs to the service."""

    journal_ids: Sequence[str]
    """Ids of the service's journal and of the journals that it took over; empty without a durable journal."""
    free_adapter_count: int
    """Number of further adapters that fit into memory; 0 while a full-parameter run leases the service."""
    adapter_count: int
    """Number of adapters of all tenants, in memory or parked."""


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """Facts about a service, except its methods."""

    base_models: Sequence[BaseModelFacts] = ()
    components: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Known component names by kind."""
    batch_tokens: int = 0
    """Maximum number of tokens of a batch; 0 if the service has no such limit."""
    lora_rank: int = 0
    """Maximum LoRA rank; 0 if the service has no such limit."""
    engine_version: str = ''
    """Engine with its version; empty if the service has no engine."""
    trainer: TrainerFacts | None = None
    """State of a model service; None for other services."""


def versioned(engine: str) -> str:
    """Return the name of an engine with its installed version, or only the name if no such package is installed."""
    try:
        return f'{engine} {metadata.version(engine)}'
    except metadata.PackageNotFoundError:
        return engine
