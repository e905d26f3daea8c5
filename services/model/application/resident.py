"""Values of `residency`: the state of an adapter in the engine, and the limits of adapters in memory."""

import asyncio
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ResidencyBounds:
    """Limits that determine when adapters are evicted and snapshotted."""

    resident_adapters: int = 256
    """Maximum number of adapters in the engine."""
    idle_seconds: float = 600.0
    """Seconds without an operation after which an adapter is evicted."""
    snapshot_device_seconds: float = 30.0
    """A snapshot is due once replaying the operations since the last one would take this many seconds."""
    snapshot_operations: int = 256
    """A snapshot is due at the latest after this many operations."""
    is_lease_allowed: bool = False
    """Whether full-parameter runs may lease the replica."""
    lease_quiet_seconds: float = 3600.0
    """No lease is granted if a LoRA adapter was created or used within this many seconds, unless its session has
    ended."""


@dataclass(eq=False)
class Resident:
    """An adapter that is in the engine or waits to be loaded."""

    adapter_id: str
    is_loaded: bool = False
    user_count: int = 0
    """Number of tasks, such as operations, that hold the adapter or wait for it."""
    holder_count: int = 0
    """Number of tasks that hold the adapter; the adapter can be evicted only if this number is 0."""
    device_seconds: float = 0.0
    """Estimated seconds to replay the operations since the last snapshot."""
    operation_count: int = 0
    """Number of operations since the last snapshot."""
    restored_number: int = 0
    """Number of the last operation in the snapshot from which the adapter was restored."""
    is_pending: bool = False
    """True if a Forward waits for its Backward; if the adapter is evicted, the Forward must run again."""
    last_used: float = 0.0
    """Time of the last use, on the clock's monotonic scale."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the adapter is loaded, evicted or copied."""
    copying: asyncio.Task[None] | None = None
    """Task that copies the state for a snapshot; None if no copy is in progress."""
    writing: asyncio.Task[None] | None = None
    """Task that writes a snapshot to the journal; None if no write is in progress."""

    def count_operation(self, device_seconds: float = 0.0) -> None:
        """Count an operation that no snapshot includes yet."""
        self.device_seconds += device_seconds
        self.operation_count += 1

    def mark_snapshotted(self) -> None:
        """Reset the counters after a snapshot of the current state."""
        self.device_seconds, self.operation_count = 0.0, 0
