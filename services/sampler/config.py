"""What the sampler service can be told. Imports no torch."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from services.kit.config import ServiceConfig


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


class SamplerConfig(ServiceConfig):
    """Configuration of the sampler service."""

    service: ClassVar[str] = 'sampler'

    base_model: str = Field(min_length=1)
    """Hub id, alias or folder of the base model; also the name clients ask for."""
    checkpoint_address: str = Field(min_length=1)
    """Where the checkpoint service is, `host:port`."""
    engine: Literal['torch'] = 'torch'
    """Which engine samples."""
    torch: TorchEngineConfig = TorchEngineConfig()
    max_resident_versions: int = Field(default=32, ge=1)
    """Adapter versions held in memory; the least recently used leave first, never one in use."""
