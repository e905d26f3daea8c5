"""The state of an adapter in the engine, and the lease of the replica. `residency` uses both."""

import asyncio
from dataclasses import dataclass, field

from services.model.domain.errors import ReplicaLeased


@dataclass(eq=False)
class Resident:
    """An adapter that is in the engine or waits to be loaded."""

    adapter_id: str
    is_loaded: bool = False
    user_count: int = 0
    """Number of operations that hold the adapter or wait for it."""
    holder_count: int = 0
    """Number of operations that hold the adapter; it can be evicted only if this is 0."""
    device_seconds: float = 0.0
    """Estimated seconds to replay the operations since the last snapshot."""
    operation_count: int = 0
    """Number of operations since the last snapshot."""
    is_pending: bool = False
    """True if a Forward waits for its Backward; if the adapter is evicted, the Forward must run again."""
    is_being_deleted: bool = False
    """True if the adapter is being deleted; operations that wait for it are rejected."""
    last_used: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the adapter is loaded, evicted or copied."""
    copying: asyncio.Task[None] | None = None
    writing: asyncio.Task[None] | None = None

    def count_operation(self, device_seconds: float = 0.0) -> None:
        """Count an operation that no snapshot includes yet."""
        self.device_seconds += device_seconds
        self.operation_count += 1

    def mark_snapshotted(self) -> None:
        """Reset the counters after a snapshot of the current state."""
        self.device_seconds, self.operation_count = 0.0, 0


class ReplicaLease:
    """The exclusive lease of the replica for a full-parameter run, which changes the shared base model.

    Only one adapter at a time has the lease, from its creation to its deletion.
    """

    def __init__(self) -> None:
        self._holder_id: str | None = None

    @property
    def is_taken(self) -> bool:
        """Whether an adapter has the lease."""
        return self._holder_id is not None

    def take(self, adapter_id: str) -> None:
        """Grant the lease to an adapter; do nothing if it already has it.

        Raises:
            ReplicaLeased: Another adapter has the lease.
        """
        if self.excludes(adapter_id):
            raise ReplicaLeased()
        self._holder_id = adapter_id

    def end(self, adapter_id: str) -> None:
        """Release the lease if this adapter has it."""
        if self._holder_id == adapter_id:
            self._holder_id = None

    def is_held_by(self, adapter_id: str) -> bool:
        """Return whether this adapter has the lease."""
        return self._holder_id == adapter_id

    def excludes(self, adapter_id: str) -> bool:
        """Return whether another adapter has the lease."""
        return self._holder_id not in (None, adapter_id)
