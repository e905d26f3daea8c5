"""What the model service can be told. Imports no torch."""

from typing import ClassVar, Literal

from pydantic import Field

from services.kit.config import ServiceConfig


class ModelConfig(ServiceConfig):
    """Configuration of the model service."""

    service: ClassVar[str] = 'model'

    base_model: str = Field(min_length=1)
    """Hub id, alias or folder of the base model; also the name clients ask for."""
    dtype: Literal['float32', 'bfloat16', 'float16'] = 'float32'
    """dtype of the frozen weights; adapters are always float32."""
    device: str = 'cpu'
    """torch device, such as 'cpu' or 'cuda:0'."""
    thread_count: int = Field(default=0, ge=0)
    """Threads torch may use. 0: torch's own choice."""
    checkpoint_address: str = Field(min_length=1)
    """Where the checkpoint service is, `host:port`."""
    max_lora_rank: int = Field(default=256, ge=1)
    """Highest LoRA rank that is accepted."""
    max_batch_tokens: int = Field(default=65536, ge=1)
    """Most tokens of one batch."""
    max_adapters: int = Field(default=256, ge=1)
    """Most adapters held at once, over all tenants."""
    upload_bytes: int = Field(default=512 << 20, ge=1)
    """Most bytes of batches that one tenant may have uploaded and lying here."""
    upload_seconds: float = Field(default=3600.0, gt=0)
    """How long an uploaded batch is kept after it was last sent to or used."""
    gap_seconds: float = Field(default=60.0, gt=0)
    """How long an operation waits for an earlier number that does not come."""
