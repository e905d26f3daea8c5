"""What the model service can be told. Imports no torch."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, JsonValue, PositiveFloat

from services.kit.config import ServiceConfig
from services.kit.weights import SegmentsConfig


class ModelConfig(ServiceConfig):
    """Configuration of the model service."""

    service: ClassVar[str] = 'model'
    callers: ClassVar[tuple[str, ...]] = ('gateway',)

    base_model: str = Field(min_length=1)
    """Hub id, alias or folder of the base model; also the name clients ask for."""
    dtype: Literal['float32', 'bfloat16', 'float16'] = 'float32'
    """dtype of the frozen weights; adapters are always float32."""
    device: str = 'cpu'
    """torch device, such as 'cpu' or 'cuda:0'."""
    thread_count: int = Field(default=0, ge=0)
    """Threads torch may use. 0: torch's own choice."""
    loss_plugins: tuple[str, ...] = ()
    """Losses that tenants may choose beside the built-in ones: of packages installed beside the service, by their names
    among the entry points `twinkle.losses`, and plugins, by id, such as `ms://me/my-loss@DIGEST` (docs/parts.md).
    Their code runs in this process; nothing is fetched or imported unless named here."""
    patches: Mapping[str, Mapping[str, JsonValue]] = {}
    """Changes to the base model as it is loaded: options by the name of the patch, in order. The samplers of the
    same base model need the same ones to agree with what is trained."""
    checkpoint_address: str = Field(min_length=1)
    """Where the checkpoint service is, `host:port`."""
    data_address: str = ''
    """Where the data service is, `host:port`, for batches that are named by loader and cursor. Empty: those are
    refused."""
    shared_memory: SegmentsConfig = SegmentsConfig()
    """How published weights are handed to a checkpoint service on this host."""
    max_lora_rank: int = Field(default=256, ge=1)
    """Highest LoRA rank that is accepted."""
    max_batch_tokens: int = Field(default=65536, ge=1)
    """Most tokens of one batch."""
    pass_tokens: int = Field(default=1024, ge=1)
    """Tokens of one pass of the model: larger batches take several, small ones of several adapters share one."""
    batch_seconds: float = Field(default=2.0, gt=0)
    """About how long one pass that adapters share may take, as far as passes before it tell: on a slow device it is
    smaller than `pass_tokens`. Longer ones are a little cheaper a token; shorter ones let tenants take turns, who
    share by their weights only where not all that waits fits into one pass."""
    tenant_weights: Mapping[str, PositiveFloat] = {}
    """Share of each tenant in the machine while all have work, positive; 1 for those not named."""
    max_adapters: int = Field(default=65536, ge=1)
    """Most adapters at once, over all tenants; those that are not resident cost disk, and some kilobytes of memory."""
    max_adapters_per_tenant: int = Field(default=16384, ge=1)
    """Most adapters of one tenant at once."""
    max_resident_adapters: int = Field(default=256, ge=1)
    """Most adapters in the engine's memory at once; beyond them, those used least lately are parked on
    disk until their next operation."""
    idle_seconds: float = Field(default=600.0, gt=0)
    """An adapter that nothing was asked of for so long is parked."""
    journal: Literal['sqlite', 'none'] = 'sqlite'
    """'sqlite': below the state folder; operations survive a crash. 'none': adapters are gone with the process."""
    snapshot_device_seconds: float = Field(default=30.0, gt=0)
    """An adapter is snapshotted once replaying what came after its last snapshot would take so long."""
    snapshot_operations: int = Field(default=256, ge=1)
    """An adapter is snapshotted after so many operations, however cheap."""
    undo_steps: int = Field(default=8, ge=0)
    """Most optimizer steps of an adapter that can be undone; what it takes is kept on disk."""
    queue_bytes: int = Field(default=1 << 30, ge=1)
    """Most bytes of one tenant's requests under way."""
    upload_bytes: int = Field(default=512 << 20, ge=1)
    """Most bytes of batches that one tenant may have uploaded and lying here."""
    upload_seconds: float = Field(default=3600.0, gt=0)
    """How long an uploaded batch is kept after it was last sent to or used."""
    gap_seconds: float = Field(default=60.0, gt=0)
    """How long an operation waits for an earlier number that does not come."""
