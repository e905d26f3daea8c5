"""Tests the division of calls among workers and the combination of their results, without workers."""

from typing import Any

import numpy as np
import pytest

from twinkle.infra import DeviceMesh
from twinkle.infra.workers.dispatch import MethodOptions, combine, divide


def method(self: Any, batch: Any, weights: Any = None, *, scale: float = 1.0) -> None:
    """Do nothing; the first argument is the batch."""


@pytest.mark.parametrize('count', [1, 2, 3, 5])
@pytest.mark.parametrize('size', [0, 1, 2, 7])
def test_parts_are_consecutive_and_complete(count: int, size: int) -> None:
    """The parts of a batch contain every example once, in the order of workers; only an empty batch has empty parts."""
    options = MethodOptions(dispatch='slice')
    batch = [{'index': index} for index in range(size)]
    calls = divide(method, options, ((batch,), {'weights': np.arange(size)}), count=count, mesh=None)
    assert [example for args, _ in calls.values() for example in args[0]] == batch
    assert np.concatenate([named['weights'] for _, named in calls.values()]).tolist() == list(range(size))
    assert list(calls) == sorted(calls)
    assert all(args[0] for args, _ in calls.values()) or size == 0
    assert len(calls) == max(1, min(size, count))


def test_ranks_of_one_data_rank_get_the_same_part() -> None:
    """Ranks that differ only in axes other than dp and fsdp get the same part of a batch."""
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2)
    calls = divide(method, MethodOptions(dispatch='slice_dp'), (([[1], [2]],), {}), count=4, mesh=mesh)
    assert [calls[rank][0][0] for rank in range(4)] == [[[1]], [[1]], [[2]], [[2]]]


@pytest.mark.parametrize('batch', [{'input_ids': [1, 2]}, [5, 6, 7], np.arange(3), (4, 5)])
def test_one_example_goes_to_the_first_worker(batch: Any) -> None:
    """A single example, or the token ids of one prompt, goes to the first worker undivided."""
    calls = divide(method, MethodOptions(dispatch='slice'), ((batch,), {'scale': 2.0}), count=2, mesh=None)
    assert list(calls) == [0]
    assert calls[0][0][0] is batch


def test_values_of_another_length_are_refused() -> None:
    """A list whose number of entries differs from that of the batch is refused, and the error names the argument."""
    with pytest.raises(ValueError, match='weights has 1 entries, but batch has 2'):
        divide(method, MethodOptions(dispatch='slice'), (([{}, {}],), {'weights': [1]}), count=2, mesh=None)


def test_other_workers_get_empty_batches() -> None:
    """The first worker gets the batch, and all others get empty lists and the options."""
    call = (([{}, {}],), {'weights': [1, 2], 'scale': 2.0})
    calls = divide(method, MethodOptions(dispatch='first'), call, count=3, mesh=None)
    assert calls == {0: call, 1: (([],), {'weights': [], 'scale': 2.0}), 2: (([],), {'weights': [], 'scale': 2.0})}


@pytest.mark.parametrize(
    ('collect', 'expected'),
    [
        ('none', [[1], [3]]),
        ('first', [1]),
        ('flatten', [1, 3]),
        ('last_pp', [[1], [3]]),
        ('last_pp_first', [1]),
        (lambda results, _mesh: len(results), 2),
    ],
)
def test_results_are_combined(collect: Any, expected: Any) -> None:
    """Each mode of `collect`, and a function in its place, combines the results of two workers."""
    assert combine(collect, [[1], [3]], mesh=None) == expected


@pytest.mark.parametrize(('collect', 'expected'), [('mean', 2), ('avg', 2), ('sum', 4)])
def test_numbers_are_reduced(collect: str, expected: float) -> None:
    """Numbers, arrays, and mappings of them are added or averaged."""
    assert combine(collect, [1, 3], mesh=None) == expected
    assert combine(collect, [{'a': 1}, {'a': 3}], mesh=None) == {'a': expected}
    assert combine(collect, [np.array([1.0]), np.array([3.0])], mesh=None) == [expected]


def test_custom_dispatch_gets_the_mesh() -> None:
    """A dispatch function gets the number of workers, the worker, its arguments and the mesh."""
    mesh = DeviceMesh.from_sizes(dp_size=2)
    options = MethodOptions(dispatch=lambda *given: ((given,), {}))
    calls = divide(method, options, ((1,), {'scale': 2}), count=2, mesh=mesh)
    assert calls[1] == (((2, 1, (1,), {'scale': 2}, mesh),), {})
