"""Configuration of the checkpoint service."""

from typing import Any, ClassVar

from pydantic import Field

from twinkle_services.kit.config import BaseModelId, ServiceConfig
from twinkle_services.kit.weights import DevicesConfig, SegmentsConfig


class CheckpointConfig(ServiceConfig):
    """Configuration of the checkpoint service."""

    service: ClassVar[str] = 'checkpoint'
    callers: ClassVar[tuple[str, ...]] = ('gateway', 'model', 'sampler')

    store_url: str = ''
    """Location of the durable store as an fsspec URL, such as `s3://bucket/folder`. Empty: the folder `checkpoint` in
    `state_dir`."""
    store_options: dict[str, Any] = Field(default={}, repr=False)
    """Options of fsspec's file system; for S3 `endpoint_url`, `key` and `secret`, unless the environment provides
    them."""
    are_folders_shown: bool = False
    """Whether the results that a tenant receives include the folders of its checkpoints on this machine. Enable it only
    if all tenants may know paths of the server."""
    shared_memory: SegmentsConfig = SegmentsConfig()
    """Shared memory for versions, and for exchanging weights with other services on this host."""
    device_transports: DevicesConfig = DevicesConfig()
    """Transports for sending large states to samplers, in addition to gRPC."""
    memory_bytes: int = Field(default=1 << 30, ge=0)
    """Maximum shared memory in bytes for versions; at most half of the host's shared memory is used. Publishing an
    unpinned version that fits in this memory returns before the version is on disk, and the version survives a crash of
    the process. 0: publishing waits for the disk."""
    ring_capacity: int = Field(default=4, ge=1)
    """Maximum number of unpinned versions per adapter; the newest version is never evicted."""
    pin_limit: int = Field(default=64, ge=1)
    """Maximum number of pinned versions of an adapter."""
    state_limit_bytes: int = Field(default=64 << 30, ge=1)
    """Maximum size in bytes of a state, of an uploaded archive, and of all unfinished uploads of a tenant together."""
    base_models: tuple[BaseModelId, ...] = ()
    """Base models of this deployment, named as in the model services: only adapters that fit these models can be
    uploaded. Empty: adapters of any base model can be uploaded, and are checked when they are loaded."""
    max_lora_rank: int = Field(default=256, ge=1)
    """Maximum LoRA rank of an uploaded adapter."""
    upload_hours: float = Field(default=24.0, gt=0)
    """Time in hours for which an unfinished upload is stored after its last stream."""
    idle_version_days: float = Field(default=30.0, gt=0)
    """Time in days after which an unpinned version without a reader or follower is deleted, even if it is the newest.
    Version numbers are not reused."""
    sweep_seconds: float = Field(default=60.0, gt=0)
    """Time in seconds between two sweeps for expired checkpoints, unused versions and abandoned uploads."""
    thread_count: int = Field(default=4, ge=1)
    """Number of threads that read, write and hash."""

    @property
    def resolved_store_url(self) -> str:
        """Location of the durable store, with the default applied."""
        return self.store_url or str(self.state_dir.resolve() / 'checkpoint')
