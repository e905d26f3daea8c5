"""What the catalogue lists, and the events by which it learns of it.

The truth about a run is in the model service, that about a checkpoint in the checkpoint
service. The catalogue is a copy that outlives both, so rows are marked, never removed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, TypeVar

Entry = TypeVar('Entry')

EntryKey = tuple[str, str]
"""Tenant and id of an entry: callers choose ids, so two tenants may have the same."""


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
    session_id: str = ''
    """The session it was made in; empty: none was named."""


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
    is_public: bool = False
    """Whether every tenant may read it."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """The owner's labels."""
    lora_rank: int = 0
    """0: not known, or it holds the base model's own weights."""


@dataclass(frozen=True, kw_only=True)
class UploadOrder:
    """An adapter made elsewhere, on its way in."""

    upload_id: str
    """Chosen by the client; what was cut goes on under it."""
    name: str
    base_model: str
    size_bytes: int
    """Of the archive."""


@dataclass(frozen=True)
class ArchivePart:
    """Consecutive bytes of a checkpoint's archive."""

    data: bytes
    size_bytes: int
    """Of the whole archive."""
    digest: str
    """blake3 of the whole archive, hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class RunFilter:
    """Which runs are listed. What is None or empty leaves out none."""

    base_model: str | None = None
    session_id: str | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels that all of them have."""
    is_active: bool | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointFilter:
    """Which checkpoints are listed. What is None or empty leaves out none."""

    run_id: str | None = None
    base_model: str | None = None
    is_optimizer_included: bool | None = None
    is_public: bool | None = None
    begin_time: datetime | None = None
    """The first moment that they may be of."""
    end_time: datetime | None = None
    """The first moment that is too late."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels that all of them have."""


@dataclass(frozen=True, kw_only=True)
class Seen(Generic[Entry]):
    """The entry exists, and looks like this now."""

    key: EntryKey
    entry: Entry
    resume_token: str


@dataclass(frozen=True, kw_only=True)
class Gone:
    """The entry exists no more."""

    key: EntryKey
    resume_token: str


@dataclass(frozen=True, kw_only=True)
class Synced:
    """The snapshot is complete; what follows are changes."""

    resume_token: str


CatalogueEvent = Seen[Entry] | Gone | Synced
"""What a feed tells."""
