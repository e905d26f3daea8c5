"""The weights that a request selects, and the keys of versions on this sampler."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from twinkle.data_format import LoraConfig, TensorData

DEFAULT_VERSION_WAIT = timedelta(seconds=10)
"""Default of the maximum time that a request waits for its version."""


@dataclass(frozen=True, kw_only=True)
class AdapterChoice:
    """The weights that a request selects. At most one of `exact`, `at_least` and `checkpoint_path` is set."""

    adapter_id: str = ''
    """Id of the adapter; empty only if a checkpoint path is set."""
    exact: int | None = None
    """The only acceptable version."""
    at_least: int | None = None
    """The lowest acceptable version."""
    checkpoint_path: str = ''
    """A durable checkpoint, `twinkle://<run>/weights/<name>`."""
    wait: timedelta = DEFAULT_VERSION_WAIT
    """Maximum time to wait for the version."""

    @property
    def lowest_version(self) -> int:
        """Lowest acceptable version; 0 if any version is acceptable."""
        return self.exact or self.at_least or 0


@dataclass(frozen=True, order=True)
class AdapterKey:
    """Identifies an adapter of one tenant; adapters of different tenants never share a key."""

    tenant_id: str
    name: str
    """Id of the adapter, or path and digest of a checkpoint."""

    def __str__(self) -> str:
        return f'{self.tenant_id}/{self.name}'


@dataclass(frozen=True, order=True)
class VersionKey:
    """Identifies one immutable version of an adapter."""

    adapter: AdapterKey
    version: int
    """Version number, at least 1; for a checkpoint, the number of its optimizer steps, or 1 if there were none."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """Current content of a durable checkpoint, which a later checkpoint may replace under the same path."""

    path: str
    digest: str
    """Hexadecimal blake3 digest of the state."""
    step_count: int
    """Number of optimizer steps that were applied before the checkpoint was saved."""

    def version_key(self, tenant_id: str) -> 'VersionKey':
        """Return the checkpoint's key, which contains the digest, so that a replacement has a different key."""
        return VersionKey(AdapterKey(tenant_id, f'{self.path}#{self.digest}'), max(self.step_count, 1))


@dataclass(frozen=True, kw_only=True)
class AdapterWeights:
    """Complete and verified weights of one version."""

    adapter_id: str
    version: int
    """Version number; 0 for a checkpoint."""
    base_model: str
    lora_config: LoraConfig | None
    """LoRA configuration; None for a full-parameter run, whose weights replace the base model's weights."""
    tensors: Mapping[str, TensorData]
    """Tensors by name, with PEFT's names for an adapter and the base model's for a full-parameter run; views of one
    buffer."""
    size_bytes: int
    digest: str
    """Hexadecimal blake3 digest of the bytes."""
    packed: object | None = None
    """The received state, a `twinkle.checkpoint_engine.PackedState`, for relaying; None if it was not retained."""
    publish_time: datetime | None = None
    """Time at which the version was published; None for checkpoints, and if the source does not report it."""
    segment_path: str = ''
    """Shared-memory file with exactly these bytes, which exists as long as this value; empty if there is no file."""
