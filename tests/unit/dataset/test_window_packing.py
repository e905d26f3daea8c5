"""Packing keeps all samples, separates them and wastes little space, for datasets and streams."""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.dataset import (
    DatasetMeta,
    InvalidExample,
    PackingDataset,
    WindowPacker,
    join_features,
    pack_best_fit,
)

WASTE_LIMIT = 0.03
"""Maximum fraction of unused space in all packs together."""


def feature(number: int, length: int) -> dict[str, Any]:
    """Return a sample whose tokens are `number * 1000 + position`."""
    ids = np.arange(length, dtype=np.int32) + number * 1000
    return {'input_ids': ids, 'labels': np.append(ids[1:], number), 'position_ids': np.arange(length), 'n': number}


def packs_of(lengths: list[int], *, capacity: int, interval: int) -> list[dict[str, Any]]:
    """Return the packs of a stream of samples with these lengths."""
    packer = WindowPacker(capacity=capacity, interval=interval)
    packs = [pack for number, length in enumerate(lengths) for pack in packer.add(feature(number, length))]
    return packs + packer.finish()


def log_normal(count: int, *, seed: int, capacity: int) -> npt.NDArray[np.int64]:
    """Return realistic lengths of chats: a median of 10 % of the capacity and a long tail, clipped at the capacity."""
    sampled = np.random.default_rng(seed).lognormal(np.log(capacity / 10), 0.8, count)
    return np.clip(sampled.astype(np.int64), 1, capacity)


@given(lengths=st.lists(st.integers(1, 60), max_size=150), interval=st.integers(1, 40))
def test_every_sample_is_in_one_pack_and_separate(lengths: list[int], interval: int) -> None:
    """Each sample is in one pack, its positions restart at 0, and its last label is ignored."""
    found: list[int] = []
    for pack in packs_of(lengths, capacity=60, interval=interval):
        assert pack['length'] == len(pack['input_ids']) <= 60
        starts = [*np.flatnonzero(pack['position_ids'] == 0), pack['length']]
        assert len(starts) - 1 == len(pack['samples'])
        for (begin, end), sample in zip(pairwise(starts), pack['samples'], strict=True):
            number = sample['n']
            found.append(number)
            ids = pack['input_ids'][begin:end]
            np.testing.assert_array_equal(ids, feature(number, lengths[number])['input_ids'])
            np.testing.assert_array_equal(pack['labels'][begin:end], [*ids[1:], -100])
            np.testing.assert_array_equal(pack['position_ids'][begin:end], np.arange(end - begin))
    assert sorted(found) == list(range(len(lengths)))


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1))
def test_waste_on_realistic_lengths_is_small(seed: int) -> None:
    """All packs together are at least 97 % full, for a dataset and for a stream with an interval of 128."""
    capacity = 1024
    lengths = log_normal(1000, seed=seed, capacity=capacity)
    bins = len(pack_best_fit(lengths.tolist(), capacity=capacity))
    packer = WindowPacker(capacity=capacity, interval=128)
    empty = np.zeros(capacity, dtype=np.int32)
    count = sum(len(packer.add({'input_ids': empty[:length], 'labels': empty[:length]})) for length in lengths)
    count += len(packer.finish())
    for packs in (bins, count):
        assert 1 - lengths.sum() / (packs * capacity) <= WASTE_LIMIT


def test_every_sample_is_returned_in_bounded_time() -> None:
    """A sample that fits badly is returned before 40 more samples are added."""
    packer = WindowPacker(capacity=100, interval=4)
    packer.add(feature(0, 51))
    for number in range(1, 40):
        if any(sample['n'] == 0 for pack in packer.add(feature(number, 99)) for sample in pack['samples']):
            break
    else:
        pytest.fail('the first sample was not returned')


def test_per_token_fields_are_joined_and_others_kept_per_sample() -> None:
    """Token-level fields are concatenated with documented defaults; other columns are kept per sample."""
    first, second = feature(0, 3), feature(1, 2)
    first |= {'advantages': [1.0, 2.0, 3.0], 'loss_weights': [0.5, 0.5, 0.5], 'rewards': 1.5}
    second |= {'advantages': [4.0, 5.0], 'rewards': 2.5}
    del second['position_ids']
    pack = join_features([first, second])
    np.testing.assert_array_equal(pack['advantages'], [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(pack['loss_weights'], [0.5, 0.5, 0.5, 1, 1])
    np.testing.assert_array_equal(pack['position_ids'], [0, 1, 2, 0, 1])
    assert pack['samples'] == [{'n': 0, 'rewards': 1.5}, {'n': 1, 'rewards': 2.5}]
    del second['advantages']
    with pytest.raises(InvalidExample, match='advantages'):
        join_features([first, second])


@pytest.mark.parametrize(
    'changes',
    [{'labels': [1, 2]}, {'attention_mask': [1] * 4}, {'input_ids': [], 'labels': []}, {'pixel_values': [0.5]}],
)
def test_rows_that_cannot_be_joined_are_refused(changes: dict[str, list[int]], tiny_llama_dir: Any) -> None:
    """An empty row, a per-token field of a different length and pixels are refused, and nothing is packed."""
    dataset = PackingDataset(DatasetMeta(data=[feature(0, 3), {**feature(1, 3), **changes}]))
    dataset.set_template('Template', model_id=str(tiny_llama_dir), max_length=50)
    dataset.is_encoded = True
    with pytest.raises(InvalidExample) as caught:
        dataset.pack_dataset()
    assert caught.value.row_index == 1
    assert not dataset.is_packed
