"""What a service says of itself, as plain facts; `kit.rpc.server_info` puts them on the wire."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any


@dataclass(frozen=True, kw_only=True)
class BaseModelFacts:
    """A base model that a service holds."""

    base_model: str
    context_tokens: int
    vocabulary_size: int
    parameter_count: int
    dtype: str
    is_trainable: bool = False
    is_sampleable: bool = False
    patches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Options of what was changed about it, by name, in order."""


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What a service knows of itself beside its methods."""

    base_models: Sequence[BaseModelFacts] = ()
    components: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Kind of component to the names known here."""
    batch_tokens: int = 0
    lora_rank: int = 0
    engine_version: str = ''
    """What computes here, with its version; empty: nothing does."""


def versioned(engine: str) -> str:
    """Return the name of an engine with the version that is installed; the name alone of one that is no package."""
    try:
        return f'{engine} {metadata.version(engine)}'
    except metadata.PackageNotFoundError:
        return engine
