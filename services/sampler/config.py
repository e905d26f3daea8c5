"""Configuration of the sampler service. Imports no torch."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from services.kit.config import ServiceConfig
from services.kit.weights import SegmentsConfig


class TorchEngineConfig(BaseModel):
    """Options of the torch engine; limits have the names that vLLM gives them."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    dtype: Literal['float32', 'bfloat16', 'float16'] = 'float32'
    """Data type of the frozen weights; on a CPU, float32 is exact and the fastest."""
    device: str = 'cpu'
    """Device that the engine runs on, such as 'cpu' or 'cuda:0'."""
    patches: Mapping[str, Mapping[str, JsonValue]] = {}
    """Patches to the base model at load time: options by patch name, applied in order. Must equal those of the model
    service."""
    max_num_seqs: int = Field(default=32, ge=1)
    """Number of sequences that run at once."""
    max_num_batched_tokens: int = Field(default=1024, ge=2)
    """Number of rows computed in one step; at least `max_num_seqs` plus `prefill_chunk_tokens`."""
    prefill_chunk_tokens: int = Field(default=512, ge=1)
    """Number of prompt tokens computed in one chunk."""
    kv_cache_memory_bytes: int = Field(default=1 << 29, ge=1)
    """Size of the key-value cache in bytes; requests wait while it is full."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Largest number of tokens in one sequence. Unset: the model's context, or what fits the key-value cache."""
    thread_count: int = Field(default=1, ge=1)
    """Number of CPU threads of torch. With one thread, results are bitwise independent of the other rows in a batch."""
    mailbox_events: int = Field(default=256, ge=1)
    """Number of events that may wait for a slow reader before its request is parked."""
    stall_seconds: float = Field(default=120.0, gt=0)
    """Time in seconds for which a request stays parked before it is ended."""


class VllmEngineConfig(BaseModel):
    """Options of the vLLM engine."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    engine_args: Mapping[str, JsonValue] = {}
    """Engine arguments with their vLLM names, such as `tensor_parallel_size`, `data_parallel_size`, `max_model_len`,
    `max_num_seqs`, `max_loras`, `max_lora_rank`, `gpu_memory_utilization` and `kv_cache_memory_bytes`. Unset ones get
    vLLM's defaults; on a CPU, `dtype` is float32, `enforce_eager` true and `kv_cache_memory_bytes` 512 MiB."""
    thread_count: int = Field(default=1, ge=1)
    """Number of CPU threads of the engine core if it runs on a CPU. The threads wait by spinning; use more than one
    only on a machine without other load."""
    hang_seconds: float = Field(default=20.0, gt=0)
    """Time in seconds without a heartbeat of the engine core after which this sampler exits, so that its requests
    continue on other samplers. Must exceed the longest step. The limit is ten times as long while the core visibly
    computes on a CPU or loads weights."""


class SamplerConfig(ServiceConfig):
    """Configuration of the sampler service."""

    service: ClassVar[str] = 'sampler'
    callers: ClassVar[tuple[str, ...]] = ('gateway', 'sampler')

    base_model: str = Field(min_length=1)
    """Hub id, alias or folder of the base model; also the name by which clients ask for it."""
    checkpoint_address: str = ''
    """Address of the checkpoint service, `host:port`. Empty: the gateways provide it."""
    gateways: tuple[str, ...] = ()
    """Addresses of the gateways whose fleet this sampler joins, each `host:port`. Empty: it joins no fleet."""
    advertise: str = ''
    """Address at which gateways reach this sampler, `host:port`. Empty: the address on which it listens."""
    lease_seconds: float = Field(default=10.0, gt=0)
    """Time in seconds in which this sampler reports three times to each gateway; a gateway may ask for less."""
    relay_patience_seconds: float = Field(default=5.0, gt=0)
    """Longest time in seconds that a relay may be silent before weights are fetched from the checkpoint service."""
    shared_memory: SegmentsConfig = SegmentsConfig()
    """Shared memory for exchanging weights with other services on this host."""
    engine: Literal['torch', 'vllm'] = 'torch'
    """Engine that samples: 'torch' is exact and small, 'vllm' is fast."""
    torch: TorchEngineConfig = TorchEngineConfig()
    """Options of the torch engine; ignored by vLLM."""
    vllm: VllmEngineConfig = VllmEngineConfig()
    """Options of the vLLM engine; ignored by torch."""
    max_resident_versions: int = Field(default=32, ge=1)
    """Number of adapter versions in memory; the least recently used one that is not in use is evicted first."""
    max_resident_bytes: int = Field(default=8 << 30, ge=1)
    """Total size in bytes of those versions' weights; an engine may need the same amount again for its copies."""
    max_followed_adapters: int = Field(default=1024, ge=1)
    """Number of adapters whose new versions are fetched as they are published; the least recently used are dropped."""
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
        """Refuse a sampler without a source of adapters."""
        if not self.checkpoint_address and not self.gateways:
            raise ValueError('checkpoint_address and gateways are both empty; set one of them')
        return self

    @model_validator(mode='after')
    def _check_followed(self) -> 'SamplerConfig':
        """Refuse a run without a tenant, or a tenant without a run."""
        if bool(self.follow_run) != bool(self.follow_tenant):
            raise ValueError('follow_run and follow_tenant must be set together')
        return self
