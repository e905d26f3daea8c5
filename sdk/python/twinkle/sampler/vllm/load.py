"""Load statistics of a vLLM engine, from the statistics of its scheduler."""

import time
from collections import deque
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

RATE_WINDOW_SECONDS = 5.0
"""Time over which the rate of sampled tokens is computed."""
_HIT_WINDOW = 1000
"""Number of steps with new prompts over which the hit rate is computed."""


class EngineStats(StatLoggerBase):
    """Stores the latest statistics of every engine core; vLLM calls `record` after each step."""

    def __init__(self) -> None:
        self.kv_usage: dict[int, float] = {}
        """Fraction of the key-value memory in use, by engine core."""
        self._hits: deque[tuple[int, int]] = deque(maxlen=_HIT_WINDOW)
        self._sampled: deque[tuple[float, int]] = deque(maxlen=4096)

    def make(self, vllm_config: Any, engine_index: int = 0) -> 'EngineStats':
        """Serve as the factory that vLLM calls for each engine core; all cores share this object."""
        del vllm_config
        self.kv_usage[engine_index] = 0.0
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Record the statistics of a step."""
        del mm_cache_stats
        if scheduler_stats is not None:
            self.kv_usage[engine_idx] = float(scheduler_stats.kv_cache_usage)
            cache = scheduler_stats.prefix_cache_stats
            if cache is not None and cache.queries:
                self._hits.append((cache.queries, cache.hits))
        if iteration_stats is not None and iteration_stats.num_generation_tokens:
            self._sampled.append((time.monotonic(), iteration_stats.num_generation_tokens))

    def log_engine_initialized(self) -> None:
        """Ignore the event."""

    @property
    def tokens_per_second(self) -> float:
        """Rate of sampled tokens over the last `RATE_WINDOW_SECONDS`."""
        begin = time.monotonic() - RATE_WINDOW_SECONDS
        return sum(count for time_, count in self._sampled if time_ >= begin) / RATE_WINDOW_SECONDS

    @property
    def prefix_hit_rate(self) -> float:
        """Fraction of the last prompts' tokens that were found in the prefix cache."""
        queries = sum(count for count, _ in self._hits)
        return sum(hits for _, hits in self._hits) / queries if queries else 0.0
