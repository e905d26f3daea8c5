"""The age of samples, in numbers of adapter versions, and a filter that drops old samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from twinkle.data_format import SampledSequence, VersionSpan
from twinkle.rollout.episode import Rollout
from twinkle.rollout.errors import UnknownVersion


class Versioned(Protocol):
    """A sample with version spans: a `SampledSequence` or a `Rollout`."""

    @property
    def version_spans(self) -> list[VersionSpan]:
        """Token ranges with the version that sampled them."""
        ...


_Sample = TypeVar('_Sample', bound=Versioned)


@dataclass(frozen=True, kw_only=True)
class FreshSamples(Generic[_Sample]):
    """The result of `drop_stale`."""

    samples: list[_Sample]
    """Samples that were not dropped, in order."""
    indexes: list[int]
    """Index of each kept sample in the batch, for selecting the matching rewards and other data."""
    ages: list[int]
    """Age of every sample of the batch, including dropped samples."""

    @property
    def dropped_count(self) -> int:
        """Number of dropped samples, which are too old or in a group with a sample that is too old."""
        return len(self.ages) - len(self.samples)

    def numbers(self) -> dict[str, float]:
        """Return the metrics `staleness/mean`, `staleness/max` (in versions) and `staleness/dropped` of the batch."""
        return {
            'staleness/mean': sum(self.ages) / max(len(self.ages), 1),
            'staleness/max': float(max(self.ages, default=0)),
            'staleness/dropped': float(self.dropped_count),
        }


def staleness_of(sample: Versioned, *, version: int, index: int = 0) -> int:
    """Return the age of a sample's oldest token in versions; 0 if it has no sampled tokens.

    Args:
        sample: the sample.
        version: the newest adapter version.
        index: index of the sample, for the error message.

    Raises:
        UnknownVersion: the sample has sampled tokens but no version spans.
        ValueError: the sample has a version newer than `version`.
    """
    if not sample.version_spans:
        if _has_sampled_tokens(sample):
            raise UnknownVersion(index)
        return 0
    newest = max(span.version for span in sample.version_spans)
    if newest > version:
        raise ValueError(
            f'version is {version}, but samples[{index}] was sampled with version {newest}; pass the newest version'
        )
    return version - min(span.version for span in sample.version_spans)


def drop_stale(
    samples: Sequence[_Sample], *, version: int, max_staleness: int, group_size: int = 1
) -> FreshSamples[_Sample]:
    """Return the samples that are not too old, and the ages of all samples.

    Args:
        samples: samples of one policy.
        version: the newest adapter version.
        max_staleness: maximum age of a sample's oldest token in versions; at least 0.
        group_size: number of adjacent samples that are kept or dropped together, for group-relative advantages.

    Raises:
        UnknownVersion: a sample has sampled tokens but no version spans.
        ValueError: `max_staleness` is negative, `group_size` does not divide the number of samples, or a sample is
            newer than `version`.
    """
    if max_staleness < 0:
        raise ValueError(f'max_staleness must be at least 0, got {max_staleness}')
    if group_size < 1 or len(samples) % group_size:
        raise ValueError(f'group_size must divide the {len(samples)} samples, got {group_size}')
    ages = [staleness_of(sample, version=version, index=index) for index, sample in enumerate(samples)]
    groups = [range(begin, begin + group_size) for begin in range(0, len(samples), group_size)]
    kept = [index for group in groups if max(ages[index] for index in group) <= max_staleness for index in group]
    return FreshSamples(samples=[samples[index] for index in kept], indexes=kept, ages=ages)


def _has_sampled_tokens(sample: Versioned) -> bool:
    """Return whether the sample has sampled tokens. For unknown types, return True."""
    match sample:
        case Rollout():
            return sample.sampled_count > 0
        case SampledSequence():
            return bool(sample.tokens)
        case _:
            return True
