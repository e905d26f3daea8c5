"""Batches have a reproducible order, which a resumed run continues exactly."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.dataloader import DataLoader, epoch_order
from twinkle.infra import DeviceMesh


@pytest.mark.parametrize(
    ('options', 'sizes'),
    [
        ({}, [4, 4, 2]),
        ({'drop_last': True}, [4, 4]),
        ({'min_batch_size': 2}, [4, 4, 2]),
        ({'min_batch_size': 3}, [4, 4]),
    ],
)
def test_last_batch_follows_the_options(options: dict[str, Any], sizes: list[int]) -> None:
    """A last batch that is too small is dropped, and the length of the loader matches."""
    loader = DataLoader(range(10), batch_size=4, **options)
    assert [len(batch) for batch in loader] == sizes
    assert len(loader) == len(sizes)


@given(
    size=st.integers(1, 30),
    batch_size=st.integers(1, 7),
    flags=st.fixed_dictionaries({'shuffle': st.booleans(), 'drop_last': st.booleans()}),
    stop=st.integers(0, 12),
)
def test_resumed_run_gets_the_remaining_batches(size: int, batch_size: int, flags: dict[str, bool], stop: int) -> None:
    """Resuming after any batch of two epochs gives the same remaining batches."""
    first, second = (DataLoader(range(size), batch_size=batch_size, **flags) for _ in range(2))
    states = [first.get_state()]
    batches: list[list[int]] = []
    for _ in range(2):
        for batch in first:
            batches.append(batch)
            states.append(first.get_state())
    stop = min(stop, len(batches))
    second.resume_from_checkpoint(json.loads(json.dumps(states[stop])))
    remaining = [batch for _ in range(2) for batch in second]
    assert remaining[: len(batches) - stop] == batches[stop:]


def test_epochs_are_shuffled_differently_and_repeatably() -> None:
    """The order depends only on the seed and the epoch."""
    first, second = (DataLoader(range(50), batch_size=50, shuffle=True, seed=3) for _ in range(2))
    epochs = [list(first).pop() for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == list(range(50))
    assert [list(second).pop() for _ in range(2)] == epochs


def test_order_is_the_same_in_every_version() -> None:
    """The order equals recorded values, so positions that were stored earlier stay valid."""
    assert list(epoch_order(8, seed=42, epoch=0)) == [4, 1, 3, 6, 0, 7, 2, 5]
    np.testing.assert_array_equal(epoch_order(4, seed=None, epoch=9), [0, 1, 2, 3])


def test_a_new_loop_is_a_new_epoch() -> None:
    """A new loop starts a new epoch, even if the previous loop was left early."""
    loader = DataLoader(range(10), batch_size=2)
    assert next(iter(loader)) == [0, 1]
    assert next(iter(loader)) == [0, 1]


def test_dataset_function_and_processor() -> None:
    """A function may create the dataset, and the processor is applied to each batch."""
    loader = DataLoader(lambda: range(4), batch_size=2)
    loader.set_processor(sum)
    assert list(loader) == [1, 5]


def test_state_of_another_loader_is_refused() -> None:
    """A state with another dataset size or order is refused."""
    state = DataLoader(range(10), batch_size=2).get_state()
    for other in (DataLoader(range(9), batch_size=2), DataLoader(range(10), batch_size=2, shuffle=True)):
        with pytest.raises(ValueError, match='the state has'):
            other.resume_from_checkpoint(state)


@pytest.mark.parametrize('count', [-1, 3])
def test_position_within_a_batch_is_refused(count: int) -> None:
    """A position that is not the beginning of a batch is refused."""
    with pytest.raises(ValueError, match='consumed_train_samples'):
        DataLoader(range(10), batch_size=2).skip_consumed_samples(count)


@pytest.mark.parametrize('options', [{'batch_size': 0}, {'batch_size': 2, 'min_batch_size': 3}])
def test_numbers_out_of_range_are_refused(options: dict[str, int]) -> None:
    """The error of an invalid batch size names the option."""
    with pytest.raises(ValueError, match='batch_size'):
        DataLoader(range(4), **options)


def test_options_without_effect_are_not_silent() -> None:
    """Workers cause a warning; unknown options, and a mesh that excludes this process, are refused."""
    with pytest.warns(UserWarning, match='num_workers'):
        DataLoader(range(4), batch_size=2, num_workers=2)
    with pytest.raises(TypeError, match='pin_memory'):
        DataLoader(range(4), batch_size=2, pin_memory=True)
    with pytest.raises(ValueError, match='rank'):
        DataLoader(range(4), batch_size=2, device_mesh=DeviceMesh.from_sizes(dp_size=2))


def test_empty_dataset_has_no_batches() -> None:
    """An empty dataset gives no batches and no error."""
    loader = DataLoader([], batch_size=2)
    assert list(loader) == []
    assert len(loader) == 0
