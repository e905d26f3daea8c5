"""One adapter's place in the engine, as `residency` keeps it."""

import asyncio
from dataclasses import dataclass, field


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
    is_unwanted: bool = False
    """It is being deleted: what waits for it to come in gives up."""
    last_used: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it comes, leaves or is copied."""
    copying: asyncio.Task[None] | None = None
    writing: asyncio.Task[None] | None = None

    def ran(self, device_seconds: float = 0.0) -> None:
        """Count an operation that is not in a snapshot yet."""
        self.device_seconds += device_seconds
        self.operation_count += 1

    def snapshotted(self) -> None:
        """Begin counting anew after a snapshot of everything up to now."""
        self.device_seconds, self.operation_count = 0.0, 0
