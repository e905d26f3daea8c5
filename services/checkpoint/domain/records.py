"""Records of versions and checkpoints, which the store saves with the weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from twinkle_services.checkpoint.domain.keys import AdapterKey, CheckpointKey, VersionKey


@dataclass(frozen=True, kw_only=True)
class AdapterVersion:
    """An immutable snapshot of an adapter's weights."""

    adapter: AdapterKey
    version: int
    """Number of the version; an adapter's versions are numbered in ascending order from 1."""
    digest: str
    """Hexadecimal blake3 digest of the state."""
    size_bytes: int
    is_pinned: bool
    """Whether the version is protected from eviction and deletion until it is unpinned."""
    create_time: datetime

    @property
    def key(self) -> VersionKey:
        """Key of the version."""
        return VersionKey(self.adapter, self.version)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A durable, named snapshot of an adapter."""

    key: CheckpointKey
    base_model: str
    is_optimizer_included: bool
    """Whether training can resume from the checkpoint."""
    size_bytes: int
    digest: str
    """Hexadecimal blake3 digest of the state."""
    step_count: int
    """Number of optimizer steps that were applied before the checkpoint was saved."""
    folder: str
    """Path of the PEFT folder if the store is a local disk whose paths are shown; empty otherwise."""
    create_time: datetime
    expire_time: datetime | None
    """Time at which the checkpoint expires; None to keep it indefinitely."""
    request_id: str = ''
    """Id of the request that created the checkpoint; empty if the request had no id."""
    is_public: bool = False
    """Whether all tenants may read the checkpoint."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels that the caller attached to the checkpoint."""
    lora_rank: int = 0
    """LoRA rank; 0 for full-parameter weights, and for checkpoints saved before the rank was recorded."""
    target_modules: tuple[str, ...] = ()
    """Adapted layers, as in `LoraConfig`; empty for full-parameter weights, and if the layers were not recorded."""

    def is_expired(self, now: datetime) -> bool:
        """Return whether the checkpoint has expired at `now`."""
        return self.expire_time is not None and self.expire_time <= now


@dataclass(frozen=True)
class NewestMark:
    """The highest version number of an adapter, recorded before that version is deleted.

    Without this record, version numbers would restart, and a sampler could confuse a new version with an old one that
    it still has in memory.
    """

    adapter: AdapterKey
    version: int


@dataclass(frozen=True)
class DamagedState:
    """A stored state whose record cannot be read."""

    key: VersionKey | CheckpointKey


Record = AdapterVersion | Checkpoint
"""Record that a store saves with the weights of a state."""
