"""Requests to the engine, the events that it yields, and its properties and load."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.data_format import InvalidProbe, ProbeResult, SamplingParams, StopReason, Trajectory, VersionSpan
from twinkle_services.kit.errors import InvalidField
from twinkle_services.sampler.domain.adapter import VersionKey
from twinkle_services.sampler.domain.errors import ContextExceeded

MAX_EXPERT_BYTES = 256 << 20
"""Maximum size in bytes of the expert indices that one prompt may return, which stay in memory until its sequences
finish."""
TopTokens = list[tuple[int, float]]
"""Pairs `(token_id, log-probability)`, natural logarithm, most likely first unless stated otherwise."""


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt given as tokens."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class TextPrompt:
    """A prompt given as plain text."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A prompt given as a chat, which is rendered with the model's chat template."""

    trajectory: Trajectory
    is_thinking_enabled: bool = True


Prompt = TokenPrompt | TextPrompt | ChatPrompt


@dataclass(frozen=True, kw_only=True)
class TokenForm:
    """Description of one token."""

    piece: bytes
    """Bytes of the token, part of a UTF-8 text; empty if no token has this id."""
    is_special: bool
    """Whether the token is omitted from texts; `piece` is then its name."""


@dataclass(frozen=True, kw_only=True)
class SequenceSoFar:
    """A sequence that another engine began, up to the last token that its reader has received."""

    sequence_index: int
    token_ids: tuple[int, ...]
    """Tokens that were delivered; may be empty."""
    is_finished: bool = False
    """Whether the final event was also delivered; a finished sequence yields no more events."""


class SleepLevel(IntEnum):
    """Sleep level of an engine, numbered as in vLLM."""

    WEIGHTS_KEPT = 1
    """The weights are moved to host memory."""
    WEIGHTS_DROPPED = 2
    """The weights are discarded, and loaded again by `wake_up`."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A prompt to run in the engine."""

    request_id: str
    """Id that is unique in the engine."""
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: VersionKey | None = None
    """Loaded version to sample from; None for the base model alone."""
    cache_salt: str = ''
    """Only requests with equal salt and version share cached prefixes."""
    continued: tuple[SequenceSoFar, ...] = ()
    """Sequences to continue, one entry per sequence, in order; empty for a new request. A continued request yields no
    `PromptComputed`; limits, penalties, stop conditions and text continue as if this engine had sampled the tokens."""

    @property
    def open_sequences(self) -> int:
        """Number of sequences that are not finished yet."""
        finished = sum(so_far.is_finished for so_far in self.continued)
        return self.params.num_samples - finished


@dataclass(frozen=True, kw_only=True)
class PromptComputed:
    """The first event of a request, which follows the computation of its prompt."""

    token_ids: tuple[int, ...]
    logprobs: list[float | None] | None = None
    """Natural log-probabilities, with None for the first token; None if they were not requested."""
    top_logprobs: list[TopTokens | None] | None = None
    probe: ProbeResult | None = None
    """Results of the request's `prompt_probe`; None if it was not requested."""
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    version: int = 0
    """Version that computed the prompt; 0 for the base model alone."""


@dataclass(frozen=True, kw_only=True)
class TokensSampled:
    """One or more new tokens of one sequence."""

    sequence_index: int
    tokens: list[int]
    logprobs: list[TopTokens]
    """One entry per token, with the sampled token first, then the most likely tokens if requested."""
    text: str
    """Text that later tokens can no longer change."""
    version: int
    """Version from which the tokens were sampled; 0 for the base model alone."""


@dataclass(frozen=True, kw_only=True)
class SequenceFinished:
    """The last event of a sequence."""

    sequence_index: int
    stop_reason: StopReason
    version_spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    text: str = ''
    """Remaining text that was not contained in earlier events."""
    routed_experts: npt.NDArray[np.integer[Any]] | None = None
    """See `SampledSequence.routed_experts`; None if the experts were not requested, or the sequence was aborted."""


GenerationEvent = PromptComputed | TokensSampled | SequenceFinished


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Properties of an engine that do not change during its lifetime."""

    base_model: str
    context_tokens: int
    """Maximum number of tokens in one sequence, including prompt and completion."""
    vocabulary_size: int
    parameter_count: int
    dtype: str
    max_sequences: int
    """Maximum number of sequences that the engine runs at once."""
    engine: str = 'torch'
    """Name of the engine, 'torch' or 'vllm'."""
    can_sleep: bool = True
    """Whether the engine can release its memory while it sleeps."""
    expert_token_bytes: int = 0
    """Size in bytes of the expert indices of one token; 0 if the engine cannot report them."""
    tool_call_format: str = ''
    """Name of the parser of the model's tool calls; empty if its chat template does not render tools."""


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """Current load of an engine."""

    running_sequences: int = 0
    waiting_sequences: int = 0
    kv_usage: float = 0.0
    """Fraction of the key-value cache in use, 0 to 1."""
    tokens_per_second: float = 0.0
    """Number of sampled tokens per second, averaged over the last few seconds."""
    prefix_hit_rate: float = 0.0
    is_paused: bool = False
    is_sleeping: bool = False
    max_sequences: int = 0
    """Maximum number of sequences that the engine runs at once."""


def spans_of(version: int, token_count: int) -> list[VersionSpan]:
    """Return the version spans of a sequence sampled from one version; empty if the sequence has no token."""
    return [VersionSpan(version=version, begin_token=0, end_token=token_count)] if token_count else []


def check_fits(prompt_tokens: int, params: SamplingParams, facts: EngineFacts) -> None:
    """Check that a prompt and its new tokens fit the context, and that the engine can report all requested values.

    Raises:
        ContextExceeded: Prompt and `max_tokens` exceed the context.
        InvalidField: `min_tokens` is larger than the number of tokens that may be sampled, `prompt_probe` does not fit
            the prompt or the vocabulary, or the engine cannot report experts, either at all or for so many tokens.
    """
    available = facts.context_tokens - prompt_tokens
    max_tokens = 1 if params.max_tokens is None else params.max_tokens
    if max_tokens > available:
        raise ContextExceeded(prompt_tokens, max_tokens, facts.context_tokens)
    limit = available if params.max_tokens is None else max_tokens
    if params.min_tokens > limit:
        raise InvalidField(
            'params.min_tokens', f'must be at most {limit}, the maximum number of new tokens, got {params.min_tokens}'
        )
    if params.return_routed_experts:
        _check_experts(facts.expert_token_bytes, (prompt_tokens + limit) * params.num_samples)
    if params.prompt_probe is None:
        return
    try:
        params.prompt_probe.check(prompt_tokens, facts.vocabulary_size)
    except InvalidProbe as error:
        raise InvalidField(f'params.{error.field}', error.problem) from error


def _check_experts(token_bytes: int, token_count: int) -> None:
    field = 'params.is_routed_experts_returned'
    if not token_bytes:
        raise InvalidField(
            field, 'requires the torch engine and a base model whose experts have softmax routers; leave it out'
        )
    if token_bytes * token_count > MAX_EXPERT_BYTES:
        limit = MAX_EXPERT_BYTES // token_bytes
        problem = f'allows at most {limit} tokens in all sequences, prompts included, got {token_count}; reduce'
        raise InvalidField(field, f'{problem} sample_count or max_tokens')
