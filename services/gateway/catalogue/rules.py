"""Runs, checkpoints, filters for lists of them, and the events of the feeds that the catalogue copies.

The model services own runs, and the checkpoint service owns checkpoints. The catalogue also lists deleted runs. It
therefore marks entries as deleted first, and removes them later.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, TypeVar

Entry = TypeVar('Entry')

EntryKey = tuple[str, str]
"""Tenant and id of an entry. Entries of two tenants may have the same id."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Training run: an adapter as its model service last reported it."""

    run_id: str
    """Id of the adapter."""
    tenant_id: str
    base_model: str
    lora_rank: int
    step_count: int
    """Number of optimizer steps applied."""
    version: int
    """Newest published version; 0 before the first."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    is_active: bool
    """Whether the adapter still exists at its model service."""
    create_time: datetime
    """UTC."""
    update_time: datetime
    """UTC."""
    session_id: str = ''
    """Session that created the run; empty if absent."""


@dataclass(frozen=True, kw_only=True)
class Creation:
    """Request for a new run, and the model service (the trainer) that the request was assigned to."""

    tenant_id: str
    base_model: str
    creation_key: str
    """`adapter <id>` if the request contains the id of the new adapter, otherwise `request <id>`."""
    trainer_id: str
    """Id of the model service's journal; without a durable journal, its name in `UpstreamsConfig.model_addresses`."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Durable, named version of a run."""

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
    """blake3 of the state, hexadecimal."""
    folder: str
    """PEFT folder; empty unless the checkpoint service stores on a local disk and shows its folders."""
    create_time: datetime
    """UTC."""
    expire_time: datetime | None = None
    """Time of deletion; None for a checkpoint without expiry."""
    is_public: bool = False
    """Whether every tenant may read the checkpoint."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels that the owner attached to the checkpoint."""
    lora_rank: int = 0
    """LoRA rank; 0 if it is unknown or the checkpoint has full weights."""


@dataclass(frozen=True, kw_only=True)
class UploadRequest:
    """Request to upload an adapter that was trained elsewhere."""

    upload_id: str
    """Id that the client chooses; an interrupted upload resumes under the same id."""
    name: str
    base_model: str
    size_bytes: int
    """Size of the archive."""


@dataclass(frozen=True)
class ArchivePart:
    """Consecutive bytes of a checkpoint's archive."""

    data: bytes
    size_bytes: int
    """Size of the complete archive."""
    digest: str
    """blake3 of the complete archive, hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class RunFilter:
    """Filter for runs; None and empty fields match every run."""

    base_model: str | None = None
    session_id: str | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels that a run must have."""
    is_active: bool | None = None
    is_published: bool | None = None
    """Whether the run has published a version."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFilter:
    """Filter for checkpoints; None and empty fields match every checkpoint."""

    run_id: str | None = None
    base_model: str | None = None
    is_optimizer_included: bool | None = None
    is_public: bool | None = None
    begin_time: datetime | None = None
    """Earliest creation time, inclusive."""
    end_time: datetime | None = None
    """Latest creation time, exclusive."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels that a checkpoint must have."""


@dataclass(frozen=True, kw_only=True)
class EntryChanged(Generic[Entry]):
    """An entry exists and has this content now."""

    key: EntryKey
    entry: Entry
    resume_token: str


@dataclass(frozen=True, kw_only=True)
class EntryDeleted:
    """An entry was deleted."""

    key: EntryKey
    resume_token: str


@dataclass(frozen=True, kw_only=True)
class EntryDamaged:
    """An entry of a snapshot exists, but its content cannot be read; the catalogue keeps the earlier content."""

    key: EntryKey
    resume_token: str = ''


@dataclass(frozen=True, kw_only=True)
class SnapshotComplete:
    """The feed has reported all existing entries; only changes follow."""

    resume_token: str


CatalogueEvent = EntryChanged[Entry] | EntryDeleted | EntryDamaged | SnapshotComplete
"""Event of a feed."""
