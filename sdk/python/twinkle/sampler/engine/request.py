"""What goes into the engine and what comes out of a step. Values only; the machine is in `engine.py`."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from twinkle.data_format import SamplingParams, StopReason, VersionSpan

if TYPE_CHECKING:
    from twinkle.nn import LoraWeights, MediaSpan

TopTokens = list[tuple[int, float]]
"""`(token_id, natural log-probability)`, most likely first."""


@dataclass(frozen=True)
class EngineAdapter:
    """One immutable version of one adapter."""

    key: str
    """Names the adapter; rows of equal `(key, version)` share one LoRA computation."""
    version: int
    """At least 1; 0 is the base model alone."""
    weights: 'LoraWeights'
    """Never changed once given to an engine."""


@dataclass(frozen=True, kw_only=True)
class SequenceSoFar:
    """A sequence that another engine began, as far as its reader has it."""

    token_ids: tuple[int, ...] = ()
    is_finished: bool = False
    """Its end was told, too: nothing more is said of it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PromptMedia:
    """The images and videos of a prompt, and where its tokens stand."""

    spans: 'tuple[MediaSpan, ...]'
    """By the prompt's tokens as rows."""
    positions_3T: npt.NDArray[np.int64]
    """Of the prompt, in time, height and width; the same on each axis where a model has one."""
    has_axes: bool = True
    """Whether the model has three."""

    def positions(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Return [3, end - begin], or [end - begin] where the model has one axis.

        What is drawn stands behind the furthest of the prompt, on every axis.
        """
        length = self.positions_3T.shape[1]
        drawn = int(self.positions_3T.max()) + 1 + np.arange(max(begin - length, 0), max(end - length, 0))
        own = self.positions_3T[:, begin : min(end, length)]
        positions_3T = np.concatenate([own, np.broadcast_to(drawn, (3, len(drawn)))], axis=1)
        return positions_3T if self.has_axes else positions_3T[0]

    def pieces(self, begin: int, end: int, *, first_row: int) -> 'list[MediaSpan]':
        """Return what of the media is among tokens `[begin, end)`, which are rows from `first_row` on."""
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
    """A prompt with everything needed to continue it."""

    request_id: str
    """Unique among running requests."""
    prompt_token_ids: tuple[int, ...]
    """At least one token."""
    params: SamplingParams
    adapter: EngineAdapter | None = None
    """None: the base model alone."""
    media: PromptMedia | None = None
    """None: the prompt is text."""
    is_continued: bool = False
    """Another engine began it; its prompt is not told again."""

    @property
    def version(self) -> int:
        """The version that draws every token of this request; 0 is the base model."""
        return self.adapter.version if self.adapter else 0


@dataclass(frozen=True, kw_only=True)
class PromptEvent:
    """A prompt is computed. Comes once for each request, before its tokens."""

    request_id: str
    logprobs: list[float | None] | None = None
    """Natural log-probability of each prompt token, the first None; None if not asked for."""
    top_logprobs: list[TopTokens | None] | None = None
    """The most likely tokens at each prompt position, the first None; None if not asked for."""
    cached_tokens: int = 0
    """Prompt tokens found in a prefix cache."""


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """New tokens of one sequence, its end, or both."""

    request_id: str
    sequence_index: int
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TopTokens] = field(default_factory=list[TopTokens])
    """One entry a token: the drawn token first, then the most likely where asked for."""
    text: str = ''
    """Text that became certain with these tokens."""
    version: int = 0
    """Version that drew these tokens."""
    stop_reason: StopReason | None = None
    """Set on the last event of the sequence, and only there."""
    version_spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    """With `stop_reason`: which version drew which tokens."""


EngineEvent = PromptEvent | TokenEvent


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """How busy an engine is."""

    running_sequences: int
    waiting_sequences: int
    kv_tokens_reserved: int
    kv_tokens_budget: int
