"""Configuration of the sampler service. This module does not import torch."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from twinkle_services.kit.config import BaseModelId, ServiceConfig
from twinkle_services.kit.weights import DevicesConfig, SegmentsConfig


class TorchEngineConfig(BaseModel):
    """Options of the torch engine; limits that vLLM also has keep their vLLM names."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    dtype: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'float32'
    """Data type of the frozen weights, which must be that of the model service. 'auto' selects bfloat16 if the model is
    stored in half precision and the device multiplies bfloat16 faster than float32. `twinkle up` sets 'auto'."""
    device: str = 'cpu'
    """Device on which the engine runs, such as 'cpu' or 'cuda:0'."""
    patches: Mapping[str, Mapping[str, JsonValue]] = {}
    """Patches of the base model: a mapping from the name of each patch to its options, in the order in which they are
    applied. The model service needs the same patches."""
    max_num_seqs: int = Field(default=32, ge=1)
    """Maximum number of sequences that run at once."""
    max_num_batched_tokens: int = Field(default=1024, ge=2)
    """Maximum number of rows computed in one step; at least `max_num_seqs` plus `prefill_chunk_tokens`."""
    prefill_chunk_tokens: int = Field(default=512, ge=1)
    """Maximum number of prompt tokens computed in one chunk."""
    kv_cache_memory_bytes: int = Field(default=1 << 29, ge=1)
    """Memory for keys, values and the state of recurrent layers, in bytes; requests wait while it is full."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum number of tokens in one sequence. Unset: the model's context, or less with a small key-value cache."""
    thread_count: int = Field(default=1, ge=1)
    """Number of CPU threads of torch. With one thread, results are bitwise independent of the other rows in a batch."""
    mailbox_events: int = Field(default=256, ge=1)
    """Maximum number of events that wait for a slow reader before its request is parked, that is, suspended until the
    reader has read them."""
    stall_seconds: float = Field(default=120.0, gt=0)
    """Maximum time in seconds that a request stays parked before it is aborted."""


class VllmEngineConfig(BaseModel):
    """Options of the vLLM engine."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    engine_args: Mapping[str, JsonValue] = {}
    """Engine arguments with their vLLM names, such as `tensor_parallel_size`, `data_parallel_size`, `max_model_len`,
    `gpu_memory_utilization` and `kv_cache_memory_bytes`. Unset arguments have vLLM's defaults, with these exceptions:
    `dtype` is 'auto' as described for the torch engine, `max_num_seqs` is 256, `max_loras` is 8, `max_lora_rank` is 32,
    `seed` is random, prefixes are cached, and statistics and requests are not logged. On a CPU, `dtype` is float32,
    `max_num_seqs` and `block_size` are 32, `enforce_eager` is true, and `kv_cache_memory_bytes` is 512 MiB."""
    thread_count: int = Field(default=1, ge=1)
    """Number of CPU threads of the engine core if it runs on a CPU. `twinkle up` divides all cores among the samplers,
    unless OMP_NUM_THREADS is set. If you start this service yourself, use more than one thread only with
    OMP_WAIT_POLICY=PASSIVE, or on a machine without other load."""
    hang_seconds: float = Field(default=20.0, gt=0)
    """Time in seconds without a heartbeat of the engine core after which this sampler exits, so that its requests
    continue on other samplers. The time must exceed the duration of the longest step. The time is ten times as long
    while the core computes on a CPU or loads weights."""


class SamplerConfig(ServiceConfig):
    """Configuration of the sampler service."""

    service: ClassVar[str] = 'sampler'
    callers: ClassVar[tuple[str, ...]] = ('gateway', 'sampler')

    base_model: BaseModelId = Field(min_length=1)
    """Hub id, alias or folder of the base model; also its name in requests."""
    checkpoint_address: str = ''
    """Address of the checkpoint service, `host:port`. Empty: the gateways provide it."""
    gateways: tuple[str, ...] = ()
    """Addresses of the gateways whose fleet this sampler joins, each `host:port`. Empty: it does not join a fleet."""
    advertise: str = ''
    """Address at which gateways reach this sampler, `host:port`. Empty: the address on which it listens."""
    lease_seconds: float = Field(default=10.0, gt=0)
    """Maximum lease interval in seconds. This sampler reports three times per interval to each gateway, which may set a
    shorter interval."""
    relay_patience_seconds: float = Field(default=5.0, gt=0)
    """Maximum time in seconds without data from a relay before weights are fetched from the checkpoint service."""
    shared_memory: SegmentsConfig = SegmentsConfig()
    """Shared memory for exchanging weights with other services on this host."""
    device_transports: DevicesConfig = DevicesConfig()
    """Transports for exchanging large states with the checkpoint service and other samplers, in addition to gRPC."""
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that this service may use, as in CUDA_VISIBLE_DEVICES; empty: all. `twinkle up` sets them."""
    engine: Literal['torch', 'vllm'] = 'torch'
    """Engine that samples: 'torch' is the reference engine, 'vllm' is the fast one."""
    torch: TorchEngineConfig = TorchEngineConfig()
    """Options of the torch engine; ignored by vLLM."""
    vllm: VllmEngineConfig = VllmEngineConfig()
    """Options of the vLLM engine; ignored by torch."""
    max_resident_versions: int = Field(default=32, ge=1)
    """Maximum number of adapter versions in memory. The least recently used version that is idle is evicted first."""
    max_resident_bytes: int = Field(default=8 << 30, ge=1)
    """Maximum total size of the adapter versions in memory, in bytes. An engine may need the same amount again for its
    copies."""
    max_followed_adapters: int = Field(default=1024, ge=1)
    """Maximum number of adapters whose new versions are fetched as they are published. The least recently used adapter
    is dropped first."""
    follow_idle_seconds: float = Field(default=1800.0, gt=0)
    """Time in seconds without a request after which an adapter is no longer followed."""
    follow_run: str = ''
    """Full-parameter run that this sampler serves exclusively: its versions replace the base model's weights as they
    are published. Empty: the sampler serves the base model and the adapters of all tenants."""
    follow_tenant: str = ''
    """Tenant that owns `follow_run`."""
    share_base_prefixes: bool = False
    """Whether tenants share cached prefixes of the base model. If they do, the latency of a prompt reveals whether
    another tenant has sent it before. Prefixes of an adapter are never shared beyond its tenant and version."""

    @model_validator(mode='after')
    def _check_source(self) -> 'SamplerConfig':
        """Check that the sampler has a source of adapters."""
        if not self.checkpoint_address and not self.gateways:
            raise ValueError('checkpoint_address and gateways are both empty; set one of them')
        return self

    @model_validator(mode='after')
    def _check_followed(self) -> 'SamplerConfig':
        """Check that a run and its tenant are set together."""
        if bool(self.follow_run) != bool(self.follow_tenant):
            raise ValueError('follow_run and follow_tenant must be set together')
        return self
