"""Which weights a request asks for, and how a version on this sampler is named."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from twinkle.data_format import LoraConfig, TensorData

DEFAULT_VERSION_WAIT = timedelta(seconds=10)
"""How long a request waits for its version where it does not say."""


@dataclass(frozen=True, kw_only=True)
class AdapterChoice:
    """The weights a request wants. At most one of `exact`, `at_least` and `checkpoint_path` is set."""

    adapter_id: str = ''
    """Empty only beside a checkpoint path."""
    exact: int | None = None
    """This version and no other."""
    at_least: int | None = None
    """This version or newer."""
    checkpoint_path: str = ''
    """A durable checkpoint, 'twinkle://<run>/weights/<name>'."""
    wait: timedelta = DEFAULT_VERSION_WAIT
    """How long to wait for it."""

    @property
    def wanted_version(self) -> int:
        """The version named by the request; 0 where any will do."""
        return self.exact or self.at_least or 0


@dataclass(frozen=True, order=True)
class AdapterKey:
    """Names an adapter of one tenant here. Another tenant's adapter of the same id is another key."""

    tenant_id: str
    name: str
    """The adapter's id, or path and digest of a checkpoint."""

    def __str__(self) -> str:
        return f'{self.tenant_id}/{self.name}'


@dataclass(frozen=True, order=True)
class VersionKey:
    """Names one immutable version of an adapter."""

    adapter: AdapterKey
    version: int
    """At least 1; of a checkpoint the optimizer steps in it."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """What a durable checkpoint is now; one of the same path may be replaced by another."""

    path: str
    digest: str
    """blake3 of its state, hexadecimal."""
    step_count: int
    """Optimizer steps in it."""

    def version_key(self, tenant_id: str) -> 'VersionKey':
        """Return how it is named here: a replaced checkpoint is another adapter, never another content."""
        return VersionKey(AdapterKey(tenant_id, f'{self.path}#{self.digest}'), max(self.step_count, 1))


@dataclass(frozen=True, kw_only=True)
class AdapterWeights:
    """A version's weights, whole and verified."""

    adapter_id: str
    version: int
    """0 for a checkpoint."""
    base_model: str
    lora_config: LoraConfig | None
    """None: no adapter's, but the base model's own weights, of a full-parameter run."""
    tensors: Mapping[str, TensorData]
    """By peft's names; views of one buffer."""
    size_bytes: int
    digest: str
    """blake3 of the bytes, hexadecimal."""
    packed: object | None = None
    """The state as it came, a `twinkle.checkpoint_engine.PackedState`, to be sent on; None where it was not kept."""
    segment_path: str = ''
    """File in shared memory that holds exactly these bytes, for as long as this value lives; empty: none."""
