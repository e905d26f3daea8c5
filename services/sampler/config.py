"""What the sampler service can be told. Imports no torch."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from services.kit.config import ServiceConfig
from services.kit.weights import SegmentsConfig


class TorchEngineConfig(BaseModel):
    """Limits of the torch engine; sizes are named as vLLM names them."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    dtype: Literal['float32', 'bfloat16', 'float16'] = 'float32'
    """Of the frozen weights; on a CPU float32 is exact and the fastest."""
    device: str = 'cpu'
    """Where it runs, such as 'cpu' or 'cuda:0'."""
    patches: Mapping[str, Mapping[str, JsonValue]] = {}
    """Changes to the base model as it is loaded: options by the name of the patch, in order. The same as those of
    the model service."""
    max_num_seqs: int = Field(default=32, ge=1)
    """Sequences continued at once."""
    max_num_batched_tokens: int = Field(default=1024, ge=2)
    """Rows computed in one step; at least `max_num_seqs` plus a prompt's piece of `prefill_chunk_tokens`."""
    prefill_chunk_tokens: int = Field(default=512, ge=1)
    """Prompt tokens computed in one piece."""
    kv_cache_memory_bytes: int = Field(default=1 << 29, ge=1)
    """Memory for keys and values; requests wait for room in it."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of one sequence. Unset: the model's context, or less if the memory holds less."""
    thread_count: int = Field(default=1, ge=1)
    """CPU threads of torch. With one, every row is bitwise the same alone and in company."""
    mailbox_events: int = Field(default=256, ge=1)
    """Events that may wait for a slow reader before its request is held back."""
    stall_seconds: float = Field(default=120.0, gt=0)
    """How long a request is held back for its reader before it is ended."""


class VllmEngineConfig(BaseModel):
    """What the vLLM engine is started with."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    engine_args: Mapping[str, JsonValue] = {}
    """Arguments as vLLM names them, such as `tensor_parallel_size`, `data_parallel_size`, `max_model_len`,
    `max_num_seqs`, `max_loras`, `max_lora_rank`, `gpu_memory_utilization` and `kv_cache_memory_bytes`. Unset ones:
    vLLM's own, but on a CPU `dtype` is float32, `enforce_eager` true and `kv_cache_memory_bytes` 512 MiB."""
    thread_count: int = Field(default=1, ge=1)
    """CPU threads of the engine core where it computes on a CPU; above one only on a machine with nothing else to
    do, since they wait by spinning."""
    hang_seconds: float = Field(default=20.0, gt=0)
    """How long the engine core may give no sign of life before it is ended, and this sampler with it, so that what
    it served goes on elsewhere. More than the longest step takes. A core that is seen to compute on a CPU, or that
    loads weights, may take ten times as long."""


class SamplerConfig(ServiceConfig):
    """Configuration of the sampler service."""

    service: ClassVar[str] = 'sampler'
    callers: ClassVar[tuple[str, ...]] = ('gateway', 'sampler')

    base_model: str = Field(min_length=1)
    """Hub id, alias or folder of the base model; also the name clients ask for."""
    checkpoint_address: str = ''
    """Where the checkpoint service is, `host:port`. Empty: where the gateways say."""
    gateways: tuple[str, ...] = ()
    """Gateways whose fleet this sampler joins, each `host:port`. Empty: it belongs to none."""
    advertise: str = ''
    """Where gateways reach this sampler, `host:port`. Empty: where it listens."""
    lease_seconds: float = Field(default=10.0, gt=0)
    """Renew the lease at each gateway at least three times in this time, or more often where the gateway says so."""
    relay_patience_seconds: float = Field(default=5.0, gt=0)
    """How long another sampler may take to send weights before the checkpoint service is asked."""
    shared_memory: SegmentsConfig = SegmentsConfig()
    """Memory in which weights are handed over to and by other services of this host."""
    engine: Literal['torch', 'vllm'] = 'torch'
    """Which engine samples: 'torch' is exact and small, 'vllm' is fast."""
    torch: TorchEngineConfig = TorchEngineConfig()
    """Of the torch engine; the other does not read it."""
    vllm: VllmEngineConfig = VllmEngineConfig()
    """Of the vLLM engine."""
    max_resident_versions: int = Field(default=32, ge=1)
    """Adapter versions held in memory; the least recently used leave first, never one in use."""
    max_resident_bytes: int = Field(default=8 << 30, ge=1)
    """Of the weights of those versions, as they came; an engine may need as much again for its own form of them."""
    max_followed_adapters: int = Field(default=1024, ge=1)
    """Adapters whose new versions are fetched as they are published; the least recently used are followed no more."""
    follow_idle_seconds: float = Field(default=1800.0, gt=0)
    """How long an adapter is followed that no request uses."""
    follow_run: str = ''
    """A full-parameter run that this sampler belongs to: its versions replace the base model's weights as they are
    published, and nothing else is served. Empty: adapters of everybody, on the base model as it is."""
    follow_tenant: str = ''
    """Whose run that is."""
    share_base_prefixes: bool = False
    """Whether tenants may find each other's prompts in the base model's prefix cache; how long a prompt takes then
    tells whether anybody has asked it before. Prompts of an adapter are never shared beyond its tenant and version."""

    @model_validator(mode='after')
    def _check_source(self) -> 'SamplerConfig':
        """Refuse a sampler that could never hear of an adapter."""
        if not self.checkpoint_address and not self.gateways:
            raise ValueError('checkpoint_address is empty and gateways has none that could tell it; give one of them')
        return self

    @model_validator(mode='after')
    def _check_followed(self) -> 'SamplerConfig':
        """Refuse a run of nobody."""
        if bool(self.follow_run) != bool(self.follow_tenant):
            raise ValueError('follow_run and follow_tenant name one run together; give both or neither')
        return self
