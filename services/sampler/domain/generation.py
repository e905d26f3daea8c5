"""A request to the engine and what the engine tells of it."""

from dataclasses import dataclass, field

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
class GenerationRequest:
    """A prompt on its way into the engine."""

    request_id: str
    """Unique in the engine."""
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: VersionKey | None = None
    """None: the base model alone. Otherwise a version that is loaded."""


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
