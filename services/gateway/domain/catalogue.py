"""What the catalogue lists, and the events by which it learns of it.

The truth about a run is in the model service, that about a checkpoint in the checkpoint
service. The catalogue is a copy that outlives both, so rows are marked, never removed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, TypeVar

Entry = TypeVar('Entry')


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run: an adapter, as last heard."""

    run_id: str
    """The adapter's id."""
    tenant_id: str
    base_model: str
    lora_rank: int
    step_count: int
    """Optimizer steps applied."""
    version: int
    """Newest published version; 0 before the first."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    is_active: bool
    """Whether it can be trained on now."""
    create_time: datetime
    """UTC."""
    update_time: datetime
    """UTC."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A durable, named version of a run."""

    checkpoint_id: str
    """`<run>/weights/<name>`."""
    tenant_id: str
    run_id: str
    name: str
    path: str
    """`twinkle://<run>/weights/<name>`."""
    base_model: str
    is_optimizer_included: bool
    size_bytes: int
    step_count: int
    digest: str
    """blake3 of its state, hexadecimal."""
    folder: str
    """The peft folder, where the store is a local disk."""
    create_time: datetime
    """UTC."""
    expire_time: datetime | None = None
    """When it is deleted; None: kept."""


@dataclass(frozen=True, kw_only=True)
class Seen(Generic[Entry]):
    """The entry exists, and looks like this now."""

    entry_id: str
    entry: Entry
    resume_token: str


@dataclass(frozen=True, kw_only=True)
class Gone:
    """The entry exists no more."""

    entry_id: str
    resume_token: str


@dataclass(frozen=True, kw_only=True)
class Synced:
    """The snapshot is complete; what follows are changes."""

    resume_token: str


CatalogueEvent = Seen[Entry] | Gone | Synced
"""What a feed tells."""
