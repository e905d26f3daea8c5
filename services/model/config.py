"""Configuration of the model service. Imports no torch."""

from typing import ClassVar

from pydantic import Field

from services.kit.config import ServiceConfig


class ModelConfig(ServiceConfig):
    """What the model service can be told."""

    service: ClassVar[str] = 'model'

    base_model: str = 'smollm2-135m-instruct'
    """Hub id, alias or folder of the base model; also the name clients ask for."""
    dtype: str = Field(default='float32', pattern='^(float32|bfloat16|float16)$')
    """dtype of the frozen weights; adapters are always float32."""
    device: str = 'cpu'
    """torch device, such as 'cpu' or 'cuda:0'."""
    thread_count: int = Field(default=0, ge=0)
    """Threads torch may use. 0: torch's own choice."""
    checkpoint_address: str = '127.0.0.1:0'
    """Where the checkpoint service is."""
    max_lora_rank: int = Field(default=256, ge=1)
    """Highest LoRA rank that is accepted."""
    max_batch_tokens: int = Field(default=65536, ge=1)
    """Most tokens of one batch."""
    max_adapters: int = Field(default=256, ge=1)
    """Most adapters held at once, over all tenants."""
    gap_seconds: float = Field(default=60.0, gt=0)
    """How long an operation waits for an earlier number that does not come."""
