"""Limits of a torch sampling engine."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of one engine."""

    max_sequences: int = 32
    """Maximum number of running sequences."""
    max_batch_tokens: int = 1024
    """Maximum number of tokens that one step computes, over all sequences."""
    prefill_chunk_tokens: int = 512
    """Maximum number of prompt tokens in one chunk."""
    kv_cache_memory_bytes: int = 1 << 29
    """Memory for keys, values and the state of recurrent layers. Requests wait until enough memory is free."""
    max_model_len: int | None = None
    """Maximum number of tokens of one sequence; less if the model's context or the cache is smaller. None: the model's
    context length."""
