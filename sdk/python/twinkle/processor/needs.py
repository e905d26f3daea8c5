"""Labels and streams that losses and metrics need, and streams that are not used."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from twinkle.data_format import IGNORE_INDEX, STREAMS, InputFeature

STREAM_NAMES = tuple(STREAMS)
"""Streams that a feature may have with any loss; a loss may declare more."""


class LossNeeds(Protocol):
    """Declarations of a loss about features, as in `twinkle.loss.Loss`."""

    ignore_index: int
    """Label to ignore, in addition to `IGNORE_INDEX`."""
    required_streams: tuple[str, ...]
    """Streams that the loss requires."""
    optional_streams: tuple[str, ...]
    """Streams that the loss reads if every feature has them."""
    required_outputs: tuple[str, ...]
    """Outputs of the forward pass that the loss requires."""


@dataclass(frozen=True, kw_only=True)
class FeatureNeeds:
    """Labels and streams to pack."""

    ignore_index: int = IGNORE_INDEX
    """Label to ignore, in addition to `IGNORE_INDEX`."""
    streams: tuple[str, ...] = STREAM_NAMES
    """Streams to pack if every feature has them. A batch is refused if only some of its features have a stream."""
    is_pooled: bool = False
    """Whether the loss compares whole features, so that a single label, at the last token, is accepted."""
    are_weightless_kept: bool = False
    """Whether to also pack labels of weight 0, for callers that need their log-probabilities."""

    @classmethod
    def of_loss(
        cls, loss: LossNeeds, *, more_streams: Collection[str] = (), are_weightless_kept: bool = False
    ) -> 'FeatureNeeds':
        """Return the needs of a loss.

        Args:
            loss: the configured loss.
            more_streams: streams that metrics read.
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
    """Return the streams that features have but neither the loss nor a metric reads, sorted.

    Args:
        features: features of the batch.
        loss: the configured loss.
        more_streams: streams that metrics read.
    """
    unused = set(STREAM_NAMES).difference(loss.required_streams, loss.optional_streams, more_streams)
    return tuple(sorted({name for feature in features for name in unused.intersection(feature)}))
