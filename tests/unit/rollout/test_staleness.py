"""Unit tests of the age of samples and of `drop_stale`."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.component import MissingLibrary
from twinkle.data_format import SampledSequence, StopReason, VersionSpan
from twinkle.rollout import (
    InvalidTool,
    PipelineClosed,
    UnknownVersion,
    as_sampler_logps,
    drop_stale,
    staleness_of,
)


def sampled(*versions: int) -> SampledSequence:
    """Return a sequence with one token of each version."""
    spans = [VersionSpan(version=version, begin_token=i, end_token=i + 1) for i, version in enumerate(versions)]
    return SampledSequence(stop_reason=StopReason.STOP, tokens=[5] * len(versions), version_spans=spans)


def test_a_sample_is_as_old_as_its_oldest_token():
    """The age of a sample is the age of its oldest token."""
    assert staleness_of(sampled(4, 3, 5), version=5) == 2
    assert staleness_of(sampled(5), version=5) == 0


def test_old_samples_are_dropped_and_counted():
    """Samples that are too old are dropped, and the result has the indices of the remaining samples."""
    fresh = drop_stale([sampled(3), sampled(1), sampled(2, 3)], version=3, max_staleness=1)
    assert fresh.indexes == [0, 2]
    assert fresh.ages == [0, 2, 1]
    assert fresh.dropped_count == 1
    assert fresh.numbers() == {'staleness/mean': 1.0, 'staleness/max': 2.0, 'staleness/dropped': 1.0}


def test_a_group_is_dropped_together():
    """If one sample of a group is too old, all samples of the group are dropped."""
    samples = [sampled(3), sampled(1), sampled(3), sampled(3)]
    fresh = drop_stale(samples, version=3, max_staleness=1, group_size=2)
    assert (fresh.indexes, fresh.dropped_count) == ([2, 3], 2)


@given(versions=st.lists(st.integers(0, 9), max_size=12), max_staleness=st.integers(0, 9))
def test_exactly_the_old_samples_are_dropped(versions, max_staleness):
    """Every sample is either returned or counted as dropped, according to its age."""
    fresh = drop_stale([sampled(version) for version in versions], version=9, max_staleness=max_staleness)
    assert fresh.indexes == [index for index, version in enumerate(versions) if 9 - version <= max_staleness]
    assert len(fresh.samples) + fresh.dropped_count == len(versions)


def test_a_sample_without_versions_is_refused():
    """A sample with tokens but without version spans raises UnknownVersion with its index."""
    unversioned = SampledSequence(stop_reason=StopReason.STOP, tokens=[5])
    with pytest.raises(UnknownVersion) as caught:
        drop_stale([sampled(1), unversioned], version=1, max_staleness=9)
    assert caught.value.index == 1


def test_a_sample_without_tokens_is_not_stale():
    """A sample without sampled tokens has age 0, so its group is not dropped because of it."""
    assert staleness_of(sampled(), version=3) == 0
    fresh = drop_stale([sampled(3), sampled()], version=3, max_staleness=0, group_size=2)
    assert (fresh.indexes, fresh.ages) == ([0, 1], [0, 0])


@pytest.mark.parametrize(
    'options', [{'version': 0}, {'max_staleness': -1}, {'group_size': 2}, {'group_size': 0}], ids=str
)
def test_numbers_out_of_range_are_refused(options):
    """A version older than a sample, a negative limit or an invalid group size raises ValueError."""
    with pytest.raises(ValueError):  # noqa: PT011 (there is no dedicated error)
        drop_stale([sampled(1)], **{'version': 1, 'max_staleness': 1, **options})


def test_log_probabilities_are_renamed_to_sampler_logps():
    """The copy has `sampler_logps` in place of `old_logps`, which must exist; the original feature is unchanged."""
    feature = {'input_ids': [1, 2], 'old_logps': [-0.5, 0.0]}
    assert as_sampler_logps(feature) == {'input_ids': [1, 2], 'sampler_logps': [-0.5, 0.0]}
    assert 'old_logps' in feature
    with pytest.raises(ValueError):  # noqa: PT011 (a missing field)
        as_sampler_logps({'input_ids': [1]})


@pytest.mark.parametrize(
    'error', [UnknownVersion(3), InvalidTool('x', 'is bad'), PipelineClosed(), MissingLibrary('a', 'b')], ids=repr
)
def test_errors_survive_pickling(error):
    """A pickled error has the same type, message and attributes."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
