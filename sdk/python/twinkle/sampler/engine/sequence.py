"""The state of requests in the engine: groups of samples that share a prompt, and their sequences."""

from collections.abc import Mapping
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinkle.data_format import StopReason
from twinkle.sampler.engine.request import EngineRequest, Experts

if TYPE_CHECKING:
    from twinkle.sampler.engine.continuation import Replay
    from twinkle.sampler.engine.prompt_scores import PromptScores
    from twinkle.sampler.engine.stopping import StopDetector, StopRules


@dataclass(eq=False, kw_only=True)
class SampleGroup:
    """Samples of one request that share one prefill and are admitted together."""

    request: EngineRequest
    sample_indices: TokenIds[int]
    """Indices of the samples in the request; at least one."""
    max_new_tokens: int
    """Maximum number of new tokens. 0: only the prompt is computed."""
    seed: int
    cache_bytes_per_sample: int
    """Maximum size of one sample's cache."""
    scores: 'PromptScores | None' = None
    """Collector of the prompt's scores; None if another group or, after a continuation, another engine reports them."""
    replays: 'Mapping[int, Replay]' = field(default_factory=dict[int, 'Replay'])
    """Samples that another engine started, by index."""
    computed_tokens: int = 0
    """Number of prompt tokens whose keys and values are in `cache`."""
    cache: Any = None
    """`KVCache` of the prompt while it is being computed."""
    experts: list[Experts] = field(default_factory=list[Experts])
    """Experts of the computed tokens of the prompt, if requested; see `routed_experts.py`."""
    is_parked: bool = False
    """Whether the sequences are parked: they keep their memory and are not continued after their first token."""

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def sample_count(self) -> int:
        """Number of sequences that need a slot; 1 if only the prompt is computed."""
        return len(self.sample_indices) if self.max_new_tokens else 1

    @property
    def is_prompt_computed(self) -> bool:
        """Whether the complete prompt is in the cache."""
        return self.computed_tokens == self.prompt_length


@dataclass(eq=False, kw_only=True)
class Sequence:
    """A running sequence."""

    group: SampleGroup
    index: int
    """Index of the sample in the request. The random numbers of the sequence depend on this index."""
    cache: Any
    rules: 'StopRules'
    stop_detector: 'StopDetector'
    tokens: list[int] = field(default_factory=list[int])
    experts: list[Experts] = field(default_factory=list[Experts])
    """Experts of the computed tokens that follow the prompt, if requested."""
    end_reason: StopReason | None = None
    """Stop reason, if another engine sampled the last token. The sequence then ends once its experts are computed."""
    uncomputed_count: int = 1
    """Number of newest tokens that are not in the cache: 1, or more if another engine started the sequence."""
