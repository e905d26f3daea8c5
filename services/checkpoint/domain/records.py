"""What is remembered of a version or a checkpoint beside its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from services.checkpoint.domain.keys import AdapterKey, CheckpointKey, VersionKey


@dataclass(frozen=True, kw_only=True)
class AdapterVersion:
    """An immutable snapshot of an adapter's weights."""

    adapter: AdapterKey
    version: int
    """Counts up within the adapter, from 1."""
    digest: str
    """blake3 of its state, hexadecimal."""
    size_bytes: int
    is_pinned: bool
    """Whether it is kept until unpinned."""
    create_time: datetime

    @property
    def key(self) -> VersionKey:
        """What it is looked up by."""
        return VersionKey(self.adapter, self.version)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A durable, named snapshot of an adapter."""

    key: CheckpointKey
    base_model: str
    is_optimizer_included: bool
    """Whether training can resume from it."""
    size_bytes: int
    digest: str
    """blake3 of its state, hexadecimal."""
    step_count: int
    """Optimizer steps applied when it was taken."""
    folder: str
    """The peft folder, where the store is a local disk; else empty."""
    create_time: datetime
    expire_time: datetime | None
    """When it is deleted. None: kept."""
    request_id: str = ''
    """Of the request that made it; empty: none was given."""
    is_public: bool = False
    """Whether every tenant may read it."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """The owner's labels."""
    lora_rank: int = 0
    """0: it holds the base model's own weights, or was made before this was noted."""

    def is_expired(self, now: datetime) -> bool:
        """Say whether its time is over."""
        return self.expire_time is not None and self.expire_time <= now


@dataclass(frozen=True)
class NewestMark:
    """The highest number an adapter ever gave a version, written down when that version is collected.

    Without it the numbers would begin again, and a sampler that holds an old version would take
    the new one for it.
    """

    adapter: AdapterKey
    version: int


Record = AdapterVersion | Checkpoint
"""What a store keeps beside the weights."""
