"""The state of requests inside the engine: groups of samples that share a prompt, and their sequences."""

from collections.abc import Mapping
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinkle.sampler.engine.request import EngineRequest, TopTokens

if TYPE_CHECKING:
    from twinkle.sampler.engine.continuation import Replay
    from twinkle.sampler.engine.stopping import StopRules, StopWatch


@dataclass(eq=False, kw_only=True)
class SampleGroup:
    """Samples of one request that share one prefill and are admitted together."""

    request: EngineRequest
    sample_indices: TokenIds[int]
    """The samples among all of the request; at least one."""
    max_new_tokens: int
    """0: the prompt is computed and nothing is drawn."""
    is_prompt_scored: bool
    """Whether log-probabilities of the prompt are to be reported."""
    seed: int
    is_prompt_told: bool = True
    """Whether the prompt is to be reported: once for each request."""
    replays: 'Mapping[int, Replay]' = field(default_factory=dict[int, 'Replay'])
    """Samples that were begun elsewhere, by index."""
    computed_tokens: int = 0
    """Prompt tokens whose keys and values are in `cache`."""
    cache: Any = None
    """`KVCache` of the prompt while it is computed."""
    is_parked: bool = False
    """Parked sequences keep their memory and are not continued."""
    prompt_logprobs: list[float | None] = field(default_factory=lambda: [None])
    prompt_top_logprobs: list[TopTokens | None] = field(default_factory=lambda: [None])

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def sample_count(self) -> int:
        """Sequences that need room; one where only the prompt is computed."""
        return len(self.sample_indices) if self.max_new_tokens else 1

    @property
    def kv_tokens_per_sample(self) -> int:
        """Most tokens one sample's cache can come to hold."""
        return self.prompt_length + self.max_new_tokens

    @property
    def is_prompt_computed(self) -> bool:
        """Whether the whole prompt is in the cache."""
        return self.computed_tokens == self.prompt_length


@dataclass(eq=False, kw_only=True)
class Sequence:
    """One completion on its way."""

    group: SampleGroup
    index: int
    """Among all samples of the request; part of what its randomness depends on."""
    cache: Any
    rules: 'StopRules'
    stop_watch: 'StopWatch'
    tokens: list[int] = field(default_factory=list[int])
    uncomputed_count: int = 1
    """Tokens at the end whose keys and values are not in the cache: one, the newest, unless it was begun elsewhere."""
