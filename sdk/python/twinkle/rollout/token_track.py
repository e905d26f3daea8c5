"""The tokens of a growing chat. Sampled tokens are stored unchanged and never tokenized again.

Legend: T is the number of tokens so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.data_format import IGNORE_INDEX, InputFeature, SampledSequence, VersionSpan, extended_experts


@dataclass(frozen=True, kw_only=True)
class TokenTrack:
    """The tokens of one chat. Immutable: methods that add tokens return a new track."""

    token_ids: tuple[int, ...]
    is_sampled: tuple[bool, ...]
    """[T]: whether the model sampled the token."""
    logps: tuple[float, ...]
    """[T]: natural log-probability of a sampled token; 0 for other tokens."""
    version_spans: tuple[VersionSpan, ...] = field(default=())
    """Ranges of sampled tokens with the version that sampled them."""
    routed_experts: npt.NDArray[np.integer[Any]] | None = field(default=None, compare=False)
    """Experts of the first tokens; see `InputFeature`. None: the sampler did not return them."""

    @classmethod
    def of_prompt(cls, token_ids: Sequence[int]) -> 'TokenTrack':
        """Create a track from the tokens of a prompt."""
        empty = cls(token_ids=(), is_sampled=(), logps=())
        return empty.with_unsampled(token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sampled_count(self) -> int:
        """Number of sampled tokens."""
        return sum(self.is_sampled)

    def with_sampled(self, sequence: SampledSequence) -> 'TokenTrack':
        """Return a track with the tokens of `sequence` appended.

        Raises:
            ValueError: the sequence does not have one log-probability per token.
        """
        tokens, logprobs = sequence.tokens, sequence.logprobs
        if len(logprobs) != len(tokens):
            raise ValueError(f'a sequence of {len(tokens)} tokens has {len(logprobs)} logprobs; give one per token')
        begin = len(self)
        spans = [
            replace(span, begin_token=begin + span.begin_token, end_token=begin + span.end_token)
            for span in sequence.version_spans
        ]
        return TokenTrack(
            token_ids=(*self.token_ids, *(int(token) for token in tokens)),
            is_sampled=(*self.is_sampled, *[True] * len(tokens)),
            logps=(*self.logps, *(float(entry[0][1]) for entry in logprobs)),
            version_spans=(*self.version_spans, *spans),
            routed_experts=extended_experts(self.routed_experts, sequence.routed_experts),
        )

    def with_unsampled(self, token_ids: Sequence[int]) -> 'TokenTrack':
        """Return a track with tokens appended that the model did not sample."""
        return replace(
            self,
            token_ids=(*self.token_ids, *(int(token) for token in token_ids)),
            is_sampled=(*self.is_sampled, *[False] * len(token_ids)),
            logps=(*self.logps, *[0.0] * len(token_ids)),
        )

    def feature(self) -> InputFeature:
        """Return the track as a training example; labels and `old_logps` are shifted to the preceding token."""
        ids = np.array(self.token_ids, dtype=np.int32)
        count = len(ids)
        is_sampled = np.array(self.is_sampled, dtype=bool)
        labels = np.full(count, IGNORE_INDEX, dtype=np.int32)
        old_logps = np.zeros(count, dtype=np.float32)
        labels[:-1] = np.where(is_sampled[1:], ids[1:], IGNORE_INDEX)
        old_logps[:-1] = np.array(self.logps[1:], dtype=np.float32)
        feature = InputFeature(
            input_ids=ids,
            attention_mask=np.ones(count, dtype=np.int32),
            position_ids=np.arange(count, dtype=np.int32),
            length=count,
            labels=labels,
            completion_mask=is_sampled.astype(np.int32),
            old_logps=old_logps,
        )
        if self.routed_experts is not None:
            feature['routed_experts'] = self.routed_experts
        return feature
