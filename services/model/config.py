"""Configuration of the model service. This module does not import torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PositiveFloat, model_validator

from twinkle_services.kit.config import BaseModelId, ServiceConfig
from twinkle_services.kit.weights import SegmentsConfig


class MeshConfig(BaseModel):
    """Sizes of the axes of the mesh, the processes that share the base model."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    dp: int = Field(default=1, ge=1, le=256)
    """Number of groups of processes. Each group has a copy of the frozen weights and runs a part of the passes."""
    fsdp: int = Field(default=1, ge=1, le=256)
    """Number of processes that divide one copy of the frozen weights. They also divide the passes of a batch."""
    ulysses: int = Field(default=1, ge=1, le=256)
    """Number of processes that divide the tokens of each pass. If `fsdp` is above 1, they also divide the frozen
    weights."""
    tp: int = Field(default=1, ge=1, le=256)
    """Number of processes that divide each layer, with Megatron-core."""
    pp: int = Field(default=1, ge=1, le=256)
    """Number of groups of processes that divide the layers and run them one after the other, with Megatron-core."""

    @model_validator(mode='after')
    def _check_axes(self) -> 'MeshConfig':
        alone = [name for name, size in (('fsdp', self.fsdp), ('ulysses', self.ulysses)) if size > 1]
        if alone and self.is_model_parallel:
            raise ValueError(f'{alone[0]} does not compose with tp and pp; use dp with them')
        return self

    @property
    def is_model_parallel(self) -> bool:
        """Whether processes divide the layers, so that Megatron-core must run them."""
        return self.tp * self.pp > 1

    @property
    def process_count(self) -> int:
        """Number of processes of the mesh."""
        return self.dp * self.fsdp * self.ulysses * self.tp * self.pp

    @property
    def pass_count(self) -> int:
        """Number of passes that run at the same time."""
        return self.dp * self.fsdp


class WorkersConfig(BaseModel):
    """Settings of the processes of the mesh, which `twinkle up` starts with torchrun."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    silence_seconds: float = Field(default=30.0, ge=5.0)
    """A process counts as lost after this many seconds without a heartbeat. All processes then end."""


class ModelConfig(ServiceConfig):
    """Settings of the model service."""

    service: ClassVar[str] = 'model'
    callers: ClassVar[tuple[str, ...]] = ('gateway',)

    base_model: BaseModelId = Field(min_length=1)
    """Hub id, alias or folder of the base model; also the name that clients request."""
    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'float32'
    """Data type of the frozen weights; adapters are always float32. 'auto' selects bfloat16 if the model is stored in
    half precision and the device multiplies bfloat16 faster than float32, but float32 if `full_parameters` is set.
    `twinkle up` sets 'auto'. The samplers of the same base model need the same type. A journal with adapters requires
    the type with which they were trained."""
    quantization: Literal['nf4'] | None = None
    """'nf4' stores the frozen weights of linear layers in four bits (QLoRA), with the extra 'nf4'. Each weight is
    restored in `dtype` for a product. The samplers keep their weights, so their log-probabilities differ from those of
    training. Quantization cannot be combined with `fsdp`, the backend 'megatron' or full-parameter training."""
    device: str = 'cpu'
    """Torch device, such as 'cpu' or 'cuda:0'; for several processes, 'cuda' without a number. `twinkle up` sets 'cuda'
    on a machine with GPUs."""
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that this service may use, as in CUDA_VISIBLE_DEVICES; empty: all. `twinkle up` sets them."""
    gpu_memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that this process may use. `twinkle up` divides a GPU among its processes."""
    allow_tf32: bool = True
    """Whether float32 products on a GPU round their inputs to TF32, which is several times faster. The layers of a
    bfloat16 model are not affected."""
    activation_checkpointing: bool | None = None
    """Whether the backward pass recomputes each layer's activations instead of storing them. Unset: on a GPU, if passes
    of 8192 rows do not fit into its memory otherwise; never on a CPU."""
    thread_count: int = Field(default=0, ge=0)
    """Number of torch threads; 0 uses torch's default."""
    loss_plugins: tuple[str, ...] = ()
    """Additional losses that tenants may choose: names of installed entry points in `twinkle.losses`, or plugin ids
    such as `ms://me/my-loss@DIGEST` (docs/parts.md). Their code runs in this process. Only plugins named here are
    fetched or imported."""
    patches: Mapping[str, Mapping[str, JsonValue]] = {}
    """Patches of the base model: a mapping from the name of each patch to its options, in the order in which they are
    applied. The samplers of the same base model need the same patches."""
    mesh: MeshConfig = MeshConfig()
    """The `dp` x `fsdp` x `ulysses` x `tp` x `pp` processes that share the model. On CPUs of one kind and with an equal
    `thread_count`, adapters are bitwise the same for all sizes except `tp` and `ulysses`, which change the rounding.
    With `fsdp`, the sizes also change the rounding of full-parameter runs. Change the sizes only while the service is
    stopped."""
    backend: Literal['transformers', 'megatron'] = 'transformers'
    """Library that runs the layers. A mesh whose `tp` or `pp` is above 1 requires 'megatron'."""
    workers: WorkersConfig = WorkersConfig()
    """Settings of the processes of the mesh."""
    checkpoint_address: str = Field(min_length=1)
    """Address of the checkpoint service, `host:port`."""
    data_address: str = ''
    """Address of the data service, `host:port`. Empty: batches by loader and cursor are refused."""
    shared_memory: SegmentsConfig = SegmentsConfig()
    """Shared memory for handing published weights to a checkpoint service on the same host."""
    max_lora_rank: int = Field(default=256, ge=1)
    """Maximum LoRA rank."""
    max_batch_tokens: int = Field(default=65536, ge=1)
    """Maximum number of tokens in a batch."""
    max_batch_examples: int = Field(default=2048, ge=1)
    """Maximum number of examples in a batch. Other tenants wait while the examples are checked before a pass."""
    pass_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of computed rows per pass through the model: tokens, without those shared with an equal prefix.
    Unset: 1024 on a CPU; on a GPU, as many as fit into its memory, from 1024 to 16384. Larger batches take several
    passes. Small batches of different adapters share a pass. Each process of the mesh works on one pass at a time."""
    batch_seconds: float = Field(default=2.0, gt=0)
    """Target duration of a pass that several tenants share, in seconds. On a slow device, fewer operations share a
    pass, so that the pass takes about this long. Each tenant may still have one operation in each pass. A higher value
    costs slightly less time per token. A lower value shares the device more fairly between tenants with many and with
    few adapters."""
    tenant_weights: Mapping[str, PositiveFloat] = {}
    """Positive weight of each tenant when tenants compete for the device; 1 for tenants that are not listed."""
    full_parameters: bool = False
    """Whether API keys with the scope `full_parameters` may train the base model itself. A full-parameter run leases
    this replica: until its lease ends, operations on other adapters are refused."""
    lease_quiet_seconds: float = Field(default=3600.0, ge=0)
    """A full-parameter run can lease the replica only if no LoRA adapter was created or ran an operation within this
    many seconds. Adapters whose sessions have ended do not count."""
    max_adapters: int = Field(default=65536, ge=1)
    """Maximum number of adapters of all tenants. An adapter that is not resident uses disk space and a few kilobytes of
    memory."""
    max_adapters_per_tenant: int = Field(default=16384, ge=1)
    """Maximum number of adapters per tenant."""
    max_resident_adapters: int = Field(default=256, ge=1)
    """Maximum number of adapters in the engine's memory. The least recently used ones are parked on disk until their
    next operation."""
    idle_seconds: float = Field(default=600.0, gt=0)
    """An adapter is parked after this many seconds without an operation."""
    merged_models_per_tenant: int = Field(default=8, ge=0)
    """Maximum number of merged models of one tenant in the state folder. Each has the size of the base model. The
    service never deletes them. If a tenant has reached the limit, delete one of its folders below `exports`."""
    parked_adapter_days: int = Field(default=90, ge=0, le=36500)
    """An adapter is removed after this many days without use, counted from its last operation or the end of its
    session, whichever is later. Its trained state is saved as a checkpoint first. 0: adapters are kept until they are
    deleted. Full-parameter runs, and adapters whose sessions have not ended, are always kept."""
    journal: Literal['sqlite', 'none'] = 'sqlite'
    """'sqlite' stores the journal below the state folder, so operations survive a crash. With 'none', all adapters are
    lost when the process exits."""
    peer_trainers: Mapping[str, Path] = {}
    """State folders of the other trainers of this base model on shared storage, by a name of your choice. An operator
    can let this service take over the runs of a named trainer that has ended (docs/gateways.md). Both services need
    settings that compute the same results."""
    accept_data_loss: bool = False
    """Whether to start although the journal lost acknowledged operations or adapters, for example because its
    write-ahead log was damaged. Set it for one start only. If operations of an adapter were lost, its next operation
    waits for their numbers and fails after at most five seconds."""
    forget_crashes: bool = False
    """Whether to reset the counts of crashes, for example after an update of the library that crashed. Adapters that
    are refused because the service crashed while it restored them are then restored again. Set it for one start
    only."""
    snapshot_device_seconds: float = Field(default=30.0, gt=0)
    """An adapter is snapshotted once replaying the operations since its last snapshot would take this many seconds."""
    snapshot_operations: int = Field(default=256, ge=1)
    """A snapshot of an adapter is due at the latest after this many operations since the last one."""
    undo_steps: int = Field(default=8, ge=0)
    """Maximum number of optimizer steps that can be undone; the state before them is stored on disk."""
    queue_bytes: int = Field(default=1 << 30, ge=1)
    """Maximum size in bytes of one tenant's requests in progress. Requests of the same total size may also wait."""
    upload_bytes: int = Field(default=512 << 20, ge=1)
    """Maximum size in bytes of one tenant's uploaded batches."""
    upload_seconds: float = Field(default=3600.0, gt=0)
    """An uploaded batch expires this many seconds after it was last written or used."""
    gap_seconds: float = Field(default=60.0, gt=0)
    """Maximum seconds that an operation waits for a missing earlier number."""

    @model_validator(mode='after')
    def _check_backend(self) -> 'ModelConfig':
        is_megatron = self.backend == 'megatron'
        if self.mesh.is_model_parallel and not is_megatron:
            raise ValueError("mesh: tp and pp require backend: 'megatron'")
        if self.full_parameters and self.mesh.ulysses > 1:
            raise ValueError('full_parameters: not supported with mesh.ulysses above 1; leave one of them out')
        refused = {
            'mesh.fsdp': self.mesh.fsdp > 1,
            'mesh.ulysses': self.mesh.ulysses > 1,
            'patches': self.patches,
            'full_parameters': self.full_parameters,
        }
        names = [name for name, is_set in refused.items() if is_set]
        if self.quantization and (is_megatron or self.mesh.fsdp > 1 or self.full_parameters):
            raise ValueError(
                'quantization: not supported with full_parameters, mesh.fsdp and Megatron; remove one of them'
            )
        if is_megatron and names:
            raise ValueError(f"{' and '.join(names)}: not supported with backend: 'megatron'; remove the setting")
        return self
