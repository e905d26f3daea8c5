"""The order in which the gradients of a batch's parts are added."""

import numpy as np
import pytest
import torch

from twinkle.model.engine.gradient import GradientSum, sum_gradients

COUNTS = [*range(1, 20), 31, 32, 33, 64, 100]


def _gradients(count: int) -> list[list[torch.Tensor] | None]:
    """Return gradients of very different magnitudes, whose sum depends on the order; some parts have no gradient."""
    draw = np.random.default_rng(count)
    return [
        None
        if draw.random() < 0.1
        else [torch.from_numpy(draw.normal(size=64) * 10.0 ** draw.integers(-6, 6)).float() for _ in range(2)]
        for _ in range(count)
    ]


def _pairwise(gradients: list[list[torch.Tensor] | None]) -> list[torch.Tensor] | None:
    """Add neighbours, level by level."""
    while len(gradients) > 1:
        pairs = [gradients[index : index + 2] for index in range(0, len(gradients), 2)]
        gradients = [sum_gradients(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return gradients[0]


def _total(gradients: list[list[torch.Tensor] | None], **options: bool) -> list[torch.Tensor] | None:
    total = GradientSum(**options)
    for gradient in gradients:
        total.add(gradient)
    return total.total()


def _is_equal(one: list[torch.Tensor] | None, other: list[torch.Tensor] | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize('count', COUNTS)
def test_neighbours_are_added_in_pairs(count: int) -> None:
    """The sum is bitwise equal to that of a binary tree over the parts, for any number of parts."""
    gradients = _gradients(count)
    assert _is_equal(_total(gradients), _pairwise(gradients))


@pytest.mark.parametrize('size', [1, 2, 4, 8])
@pytest.mark.parametrize('rank_count', [2, 4, 8])
def test_complete_subtrees_can_be_added_separately(size: int, rank_count: int) -> None:
    """Adding blocks of 1, 2, 4 or 8 parts, and then the sums of the blocks, gives bitwise the same sum as all parts."""
    count = size * rank_count
    gradients = _gradients(count)
    blocks = [_total(gradients[begin : begin + size]) for begin in range(0, count, size)]
    assert _is_equal(_total(blocks), _total(gradients))


def test_folded_sum_adds_one_after_the_other() -> None:
    """A folded sum adds the parts one after another and stores a single partial sum."""
    gradients, total = _gradients(10), GradientSum(is_folded=True)
    expected = None
    for gradient in gradients:
        total.add(gradient)
        expected = sum_gradients(expected, gradient)
        assert len(total._subtrees) == 1  # noqa: SLF001 - the number of stored sums
    assert _is_equal(total.total(), expected)


def test_parts_without_gradients_have_no_sum() -> None:
    """No parts, and parts without gradients, give no sum."""
    assert _total([]) is None
    assert _total([None, None, None]) is None
