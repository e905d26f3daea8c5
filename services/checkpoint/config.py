"""What the checkpoint service can be told."""

from typing import ClassVar

from pydantic import Field

from services.kit.config import ServiceConfig


class CheckpointConfig(ServiceConfig):
    """Configuration of the checkpoint service."""

    service: ClassVar[str] = 'checkpoint'

    store_url: str = ''
    """Where states are kept, as fsspec writes it. Empty: the folder `checkpoint` in `state_dir`."""
    ring_capacity: int = Field(default=4, ge=1)
    """Versions of an adapter that are kept without a pin; the newest is always one of them."""
    pin_limit: int = Field(default=64, ge=1)
    """Most pinned versions of an adapter."""
    state_limit_bytes: int = Field(default=64 << 30, ge=1)
    """Largest state, or uploaded archive, that is taken."""
    upload_hours: float = Field(default=24.0, gt=0)
    """How long an upload that does not grow is kept."""
    sweep_seconds: float = Field(default=60.0, gt=0)
    """Time between two looks for what has expired."""
    thread_count: int = Field(default=4, ge=1)
    """Threads that read, write and hash."""

    @property
    def resolved_store_url(self) -> str:
        """Where states are kept, with the default filled in."""
        return self.store_url or str(self.state_dir.resolve() / 'checkpoint')
