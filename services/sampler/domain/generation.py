"""A request to the engine and what the engine tells of it."""

from dataclasses import dataclass, field
from enum import IntEnum

from services.kit.errors import InvalidField
from services.sampler.domain.adapter import VersionKey
from services.sampler.domain.errors import ContextExceeded
from twinkle.data_format import SamplingParams, StopReason, Trajectory, VersionSpan

TopTokens = list[tuple[int, float]]
"""`(token_id, natural log-probability)`, most likely first."""


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt as tokens."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class TextPrompt:
    """A prompt as plain text."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A prompt as a chat, to go through the model's own template."""

    trajectory: Trajectory
    is_thinking_enabled: bool = True


Prompt = TokenPrompt | TextPrompt | ChatPrompt


@dataclass(frozen=True, kw_only=True)
class TokenForm:
    """What one token stands for."""

    piece: bytes
    """A part of a text in UTF-8; empty where the id has no token."""
    is_special: bool
    """Left out of texts; `piece` is its name."""


@dataclass(frozen=True, kw_only=True)
class SequenceSoFar:
    """A sequence that another engine began, as far as its reader has it."""

    sequence_index: int
    token_ids: tuple[int, ...]
    """The tokens that were delivered; may be empty."""
    is_finished: bool = False
    """Its end was delivered, too: nothing more is said of it."""


class SleepLevel(IntEnum):
    """How deep an engine sleeps, as vLLM counts it."""

    WEIGHTS_KEPT = 1
    WEIGHTS_DROPPED = 2


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A prompt on its way into the engine."""

    request_id: str
    """Unique in the engine."""
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: VersionKey | None = None
    """None: the base model alone. Otherwise a version that is loaded."""
    cache_salt: str = ''
    """Prefixes are shared between requests of the same salt and version only."""
    continued: tuple[SequenceSoFar, ...] = ()
    """Empty: a new request. Otherwise one entry for each sequence, in order: no `PromptComputed` comes, and
    limits, penalties, stops and text go on as if this engine had drawn those tokens itself."""

    @property
    def open_sequences(self) -> int:
        """How many sequences are still to end."""
        finished = sum(so_far.is_finished for so_far in self.continued)
        return self.params.num_samples - finished


@dataclass(frozen=True, kw_only=True)
class PromptComputed:
    """The prompt is in the cache; comes once, first."""

    token_ids: tuple[int, ...]
    logprobs: list[float | None] | None = None
    """Natural; the first None. None where not asked for."""
    top_logprobs: list[TopTokens | None] | None = None
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, kw_only=True)
class TokensDrawn:
    """New tokens of one sequence; at least one."""

    sequence_index: int
    tokens: list[int]
    logprobs: list[TopTokens]
    """One entry a token: the drawn token first, then the most likely where asked for."""
    text: str
    """Text that became certain."""
    version: int
    """Version that drew them; 0 is the base model alone."""


@dataclass(frozen=True, kw_only=True)
class SequenceEnded:
    """A sequence is complete; comes once for each."""

    sequence_index: int
    stop_reason: StopReason
    version_spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    text: str = ''
    """Text that was held back."""


GenerationEvent = PromptComputed | TokensDrawn | SequenceEnded


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What does not change while an engine lives."""

    base_model: str
    context_tokens: int
    """Most tokens of one sequence, prompt and completion together."""
    vocabulary_size: int
    parameter_count: int
    dtype: str
    max_sequences: int
    """Sequences it continues at once."""
    engine: str = 'torch'
    """What computes: 'torch' or 'vllm'."""
    can_sleep: bool = True
    """Whether it can give memory back while it sleeps."""


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """How busy an engine is now."""

    running_sequences: int = 0
    waiting_sequences: int = 0
    kv_usage: float = 0.0
    """Share of the key-value memory in use, 0 to 1."""
    tokens_per_second: float = 0.0
    """Over the last seconds."""
    prefix_hit_rate: float = 0.0
    is_paused: bool = False
    is_sleeping: bool = False
    max_sequences: int = 0
    """Sequences it continues at once, at most."""


def spans_of(version: int, token_count: int) -> list[VersionSpan]:
    """Return the spans of a sequence that one version drew; none where it has no token."""
    return [VersionSpan(version=version, begin_token=0, end_token=token_count)] if token_count else []


def check_fits(prompt_tokens: int, params: SamplingParams, facts: EngineFacts) -> None:
    """Refuse what cannot fit, before anything is waited for.

    Raises:
        ContextExceeded: names all three numbers.
        InvalidField: more tokens are to be drawn at least than at most.
    """
    room = facts.context_tokens - prompt_tokens
    max_tokens = 1 if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        raise ContextExceeded(prompt_tokens, max_tokens, facts.context_tokens)
    most = room if params.max_tokens is None else max_tokens
    if params.min_tokens > most:
        raise InvalidField('params.min_tokens', f'must be at most the {most} new tokens allowed')
