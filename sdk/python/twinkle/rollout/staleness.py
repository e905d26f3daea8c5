"""How old samples are, in versions of the weights, and the bound that is held on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from twinkle.data_format import SampledSequence, VersionSpan
from twinkle.rollout.episode import Rollout
from twinkle.rollout.errors import UnknownVersion


class Versioned(Protocol):
    """What names the versions that drew it: a `SampledSequence`, a `Rollout`."""

    @property
    def version_spans(self) -> list[VersionSpan]:
        """Which version drew which tokens."""
        ...


_Sample = TypeVar('_Sample', bound=Versioned)


@dataclass(frozen=True, kw_only=True)
class FreshSamples(Generic[_Sample]):
    """What is left of a batch after the bound, and what is not."""

    samples: list[_Sample]
    """Those young enough, in order."""
    indexes: list[int]
    """Where each of them was in the batch, to pick rewards and their like by."""
    ages: list[int]
    """Age of every sample of the batch, those that were dropped included."""

    @property
    def dropped_count(self) -> int:
        """Samples that were too old, or of a group with one that was."""
        return len(self.ages) - len(self.samples)

    def numbers(self) -> dict[str, float]:
        """Return `staleness/mean`, `staleness/max` (versions, over the whole batch) and `staleness/dropped`."""
        return {
            'staleness/mean': sum(self.ages) / max(len(self.ages), 1),
            'staleness/max': float(max(self.ages, default=0)),
            'staleness/dropped': float(self.dropped_count),
        }


def staleness_of(sample: Versioned, *, version: int, index: int = 0) -> int:
    """Return how many versions ago the oldest token of a sample was drawn; 0 where none was drawn.

    Args:
        sample: what was drawn.
        version: the newest one, that the trainer has now.
        index: of the sample, for the error.

    Raises:
        UnknownVersion: the sample has drawn tokens and names no versions.
        ValueError: it names one that is newer than `version`.
    """
    if not sample.version_spans:
        if _has_drawn(sample):
            raise UnknownVersion(index)
        return 0
    newest = max(span.version for span in sample.version_spans)
    if newest > version:
        raise ValueError(f'version is {version}, but samples[{index}] was drawn with {newest}; give the newest version')
    return version - min(span.version for span in sample.version_spans)


def drop_stale(
    samples: Sequence[_Sample], *, version: int, max_staleness: int, group_size: int = 1
) -> FreshSamples[_Sample]:
    """Return the samples that are at most so old, and count the others.

    Args:
        samples: of one policy.
        version: the newest one, that the trainer has now.
        max_staleness: most versions between a sample's oldest token and `version`; at least 0.
        group_size: samples side by side that go or stay together, as advantages relative to a group need.

    Raises:
        UnknownVersion: a sample has drawn tokens and names no versions.
        ValueError: a number is out of its range.
    """
    if max_staleness < 0:
        raise ValueError(f'max_staleness must be at least 0, got {max_staleness}')
    if group_size < 1 or len(samples) % group_size:
        raise ValueError(f'group_size must divide the {len(samples)} samples, got {group_size}')
    ages = [staleness_of(sample, version=version, index=index) for index, sample in enumerate(samples)]
    groups = [range(begin, begin + group_size) for begin in range(0, len(samples), group_size)]
    kept = [index for group in groups if max(ages[index] for index in group) <= max_staleness for index in group]
    return FreshSamples(samples=[samples[index] for index in kept], indexes=kept, ages=ages)


def _has_drawn(sample: Versioned) -> bool:
    """Return whether a model drew tokens of it; of a sample of another kind, which does not say, that is assumed."""
    match sample:
        case Rollout():
            return sample.sampled_count > 0
        case SampledSequence():
            return bool(sample.tokens)
        case _:
            return True
