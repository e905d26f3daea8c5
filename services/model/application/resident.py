"""One adapter's place in the engine, as `residency` keeps it."""

import asyncio
from dataclasses import dataclass, field

from services.model.domain.errors import ReplicaLeased


@dataclass(eq=False)
class Resident:
    """One adapter's place; kept while it is in the engine or on its way."""

    adapter_id: str
    is_loaded: bool = False
    user_count: int = 0
    """Operations that hold it or wait to."""
    holder_count: int = 0
    """Operations that hold it: it may not leave."""
    device_seconds: float = 0.0
    """To replay what came after the last snapshot."""
    operation_count: int = 0
    """Operations after the last snapshot."""
    is_pending: bool = False
    """A Forward waits for its Backward: leaving now costs running it again."""
    is_being_deleted: bool = False
    """It is being deleted: what waits for it to come in gives up."""
    last_used: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it comes, leaves or is copied."""
    copying: asyncio.Task[None] | None = None
    writing: asyncio.Task[None] | None = None

    def count_operation(self, device_seconds: float = 0.0) -> None:
        """Count an operation that is not in a snapshot yet."""
        self.device_seconds += device_seconds
        self.operation_count += 1

    def mark_snapshotted(self) -> None:
        """Begin counting anew after a snapshot of everything up to now."""
        self.device_seconds, self.operation_count = 0.0, 0


class ReplicaLease:
    """At most one adapter holds it, from its creation to its end."""

    def __init__(self) -> None:
        """Begin without a holder."""
        self._holder_id: str | None = None

    @property
    def is_taken(self) -> bool:
        """Whether some adapter holds it."""
        return self._holder_id is not None

    def take(self, adapter_id: str) -> None:
        """Give it to an adapter; one that holds it keeps it.

        Raises:
            ReplicaLeased: another one holds it.
        """
        if self.excludes(adapter_id):
            raise ReplicaLeased()
        self._holder_id = adapter_id

    def end(self, adapter_id: str) -> None:
        """Take it back, if that adapter holds it."""
        if self._holder_id == adapter_id:
            self._holder_id = None

    def is_held_by(self, adapter_id: str) -> bool:
        """Say whether that adapter holds it."""
        return self._holder_id == adapter_id

    def excludes(self, adapter_id: str) -> bool:
        """Say whether another adapter than that one holds it."""
        return self._holder_id not in (None, adapter_id)
