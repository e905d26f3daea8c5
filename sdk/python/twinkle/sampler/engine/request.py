"""The engine's requests and events, as values."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from twinkle.data_format import ProbeResult, SamplingParams, StopReason, VersionSpan

if TYPE_CHECKING:
    from twinkle.nn import LoraWeights, MediaSpan

TopTokens = list[tuple[int, float]]
"""`(token_id, natural log-probability)`, most likely first."""


Experts = npt.NDArray[np.integer[Any]]
"""int [T, layers with experts, experts per token]: experts of T tokens."""


@dataclass(frozen=True)
class EngineAdapter:
    """One immutable version of one adapter."""

    key: str
    """Name of the adapter; empty for new base weights that replaced the original weights. Rows with equal
    `(key, version)` share one LoRA computation."""
    version: int
    """Version number, at least 1."""
    weights: 'LoraWeights'
    """Weights; must not be modified after they were passed to an engine."""


@dataclass(frozen=True, kw_only=True)
class SequenceSoFar:
    """The part of another engine's sequence that the client already received."""

    token_ids: tuple[int, ...] = ()
    is_finished: bool = False
    """Whether the client also received the end of the sequence, which then has no further events."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PromptMedia:
    """The images, videos and audio of a prompt, and the positions of its tokens."""

    spans: 'tuple[MediaSpan, ...]'
    """Media spans, whose rows are positions in the prompt."""
    positions_3T: npt.NDArray[np.int64]
    """Positions of the prompt's tokens in time, height and width; equal on all axes if the model has only one axis."""
    has_axes: bool = True
    """Whether the model has three position axes."""

    def positions(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Return the positions of tokens [begin, end): int64 [3, end - begin], or [end - begin] for one axis.

        On every axis, sampled tokens follow the largest position of the prompt.
        """
        length = self.positions_3T.shape[1]
        sampled = int(self.positions_3T.max()) + 1 + np.arange(max(begin - length, 0), max(end - length, 0))
        prompt = self.positions_3T[:, begin : min(end, length)]
        positions_3T = np.concatenate([prompt, np.broadcast_to(sampled, (3, len(sampled)))], axis=1)
        return positions_3T if self.has_axes else positions_3T[0]

    def spans_between(self, begin: int, end: int, *, first_row: int) -> 'list[MediaSpan]':
        """Return the parts of the media spans in the tokens `[begin, end)`; token `begin` becomes row `first_row`."""
        return [
            replace(
                span,
                begin_row=max(span.begin_row, begin) - begin + first_row,
                end_row=min(span.end_row, end) - begin + first_row,
                first_token=max(begin - span.begin_row, 0),
            )
            for span in self.spans
            if span.begin_row < end and begin < span.end_row
        ]


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A prompt with all parameters for sampling."""

    request_id: str
    """Unique among running requests."""
    prompt_token_ids: tuple[int, ...]
    """Tokens of the prompt, at least one."""
    params: SamplingParams
    adapter: EngineAdapter | None = None
    """Adapter version. None: the base model."""
    media: PromptMedia | None = None
    """Media of the prompt. None: the prompt is text."""
    is_continued: bool = False
    """Whether another engine started the request. Its prompt is not reported again."""

    @property
    def version(self) -> int:
        """Version that samples all tokens of this request; 0 is the original base model."""
        return self.adapter.version if self.adapter else 0


@dataclass(frozen=True, kw_only=True)
class PromptEvent:
    """Reports that a prompt was computed; sent once per request, before its tokens, but not for continued requests."""

    request_id: str
    logprobs: list[float | None] | None = None
    """Natural log-probability of each prompt token, with None for the first. None: not requested."""
    top_logprobs: list[TopTokens | None] | None = None
    """Most likely tokens at each prompt position, with None for the first. None: not requested."""
    probe: ProbeResult | None = None
    """Results of the request's `prompt_probe`. None: not requested."""
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    version: int = 0
    """Version that computed the prompt."""


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """New tokens of one sequence, its end, or both."""

    request_id: str
    sequence_index: int
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TopTokens] = field(default_factory=list[TopTokens])
    """One entry per token: the sampled token, followed by the most likely tokens if requested."""
    text: str = ''
    """New text; text that may still change is withheld."""
    version: int = 0
    """Version that sampled these tokens."""
    stop_reason: StopReason | None = None
    """Reason for the end; set only in the last event of the sequence."""
    version_spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    """Version spans of the sequence; set together with `stop_reason`."""
    routed_experts: Experts | None = None
    """See `SampledSequence.routed_experts`; set together with `stop_reason`. None: not requested, or the sequence was
    aborted."""


EngineEvent = PromptEvent | TokenEvent


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """The load of an engine."""

    running_sequences: int
    waiting_sequences: int
    cache_bytes_reserved: int
    cache_bytes_budget: int
