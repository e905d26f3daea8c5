"""What the checkpoint service can be told."""

from typing import Any, ClassVar

from pydantic import Field

from services.kit.config import ServiceConfig
from services.kit.weights import SegmentsConfig


class CheckpointConfig(ServiceConfig):
    """Configuration of the checkpoint service."""

    service: ClassVar[str] = 'checkpoint'
    callers: ClassVar[tuple[str, ...]] = ('gateway', 'model', 'sampler')

    store_url: str = ''
    """Where states are kept, as fsspec writes it, such as `s3://bucket/folder`. Empty: the folder `checkpoint` in
    `state_dir`."""
    store_options: dict[str, Any] = Field(default={}, repr=False)
    """What fsspec has to be told to reach the store; for S3 `endpoint_url`, `key` and `secret`, where the usual
    places of credentials do not say it."""
    shared_memory: SegmentsConfig = SegmentsConfig()
    memory_bytes: int = Field(default=1 << 30, ge=0)
    """Most shared memory that versions are kept in, and never more than half of what the host has of it. They are
    answered from there before they are on the disk, and outlive the process; 0: the disk comes first."""
    ring_capacity: int = Field(default=4, ge=1)
    """Versions of an adapter that are kept without a pin; the newest is always one of them."""
    pin_limit: int = Field(default=64, ge=1)
    """Most pinned versions of an adapter."""
    state_limit_bytes: int = Field(default=64 << 30, ge=1)
    """Largest state, or uploaded archive, that is taken."""
    base_models: tuple[str, ...] = ()
    """Base models of this deployment, as the model services are told: adapters of these alone can be uploaded, and have
    to fit them. Empty: of any, and whether one fits is seen where it is loaded."""
    max_lora_rank: int = Field(default=256, ge=1)
    """Highest rank of an adapter that is uploaded."""
    upload_hours: float = Field(default=24.0, gt=0)
    """How long an upload that does not grow is kept."""
    idle_version_days: float = Field(default=30.0, gt=0)
    """A version that is not pinned, and that nobody published, read or followed for so long, is deleted; the newest
    one, too. Numbers count on where they were."""
    sweep_seconds: float = Field(default=60.0, gt=0)
    """Time between two looks for what has expired."""
    thread_count: int = Field(default=4, ge=1)
    """Threads that read, write and hash."""

    @property
    def resolved_store_url(self) -> str:
        """Where states are kept, with the default filled in."""
        return self.store_url or str(self.state_dir.resolve() / 'checkpoint')
