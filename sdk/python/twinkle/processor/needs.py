"""What losses and metrics ask of the features, and what of theirs none of them would read."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from twinkle.data_format import IGNORE_INDEX, STREAMS, InputFeature

STREAM_NAMES = tuple(STREAMS)
"""The per-label numbers a feature may carry whatever the loss; a loss may declare more."""


class LossNeeds(Protocol):
    """The declarations of a loss that concern features; `twinkle.loss.Loss` has them."""

    ignore_index: int
    """Label that does not count, beside `IGNORE_INDEX`."""
    required_streams: tuple[str, ...]
    """Per-label numbers it reads."""
    optional_streams: tuple[str, ...]
    """Those it reads where every feature carries them."""
    required_outputs: tuple[str, ...]
    """What it asks of the forward pass."""


@dataclass(frozen=True, kw_only=True)
class FeatureNeeds:
    """What a batch is packed for."""

    ignore_index: int = IGNORE_INDEX
    """Label that does not count, beside `IGNORE_INDEX`."""
    streams: tuple[str, ...] = STREAM_NAMES
    """Per-label numbers to pack where every feature carries them."""
    is_pooled: bool = False
    """Whether features are compared as wholes, so that one label, at the last token, may stand for each."""
    are_weightless_kept: bool = False
    """Whether labels of weight 0 are rows too, for a caller that wants their log-probabilities."""

    @classmethod
    def of_loss(
        cls, loss: LossNeeds, *, more_streams: Collection[str] = (), are_weightless_kept: bool = False
    ) -> 'FeatureNeeds':
        """Return what a loss asks for.

        Args:
            loss: the configured one.
            more_streams: what metrics read.
            are_weightless_kept: see the field.
        """
        names = (*loss.required_streams, *loss.optional_streams, *more_streams)
        return cls(
            ignore_index=loss.ignore_index,
            streams=tuple(dict.fromkeys(names)),
            is_pooled='embeddings' in loss.required_outputs,
            are_weightless_kept=are_weightless_kept,
        )


def ignored_streams(
    features: Iterable[InputFeature], loss: LossNeeds, *, more_streams: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the streams that features carry and nothing reads, sorted: their caller is to be told.

    Args:
        features: the batch.
        loss: the configured one.
        more_streams: what metrics read.
    """
    idle = set(STREAM_NAMES).difference(loss.required_streams, loss.optional_streams, more_streams)
    return tuple(sorted({name for feature in features for name in idle.intersection(feature)}))
