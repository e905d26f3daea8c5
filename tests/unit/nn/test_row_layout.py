"""Tests of how the rows of a pass are divided among ranks."""

from dataclasses import dataclass

import pytest
import torch

from twinkle.data_format import LoraConfig
from twinkle.nn import AdapterSpan, LoraWeights, RowDropout, RowLayout
from twinkle.nn.row_layout import rank_row_count

WIDTHS = {64, 128}
LAYERS = {'layer': (8, 8)}


@dataclass(frozen=True)
class Ranks:
    """Group of ranks with the two fields that a layout reads."""

    rank: int
    size: int


def layouts_of(row_count: int, adapters: list[AdapterSpan], *, size: int) -> list[RowLayout]:
    """Return the layout of each rank."""
    return [
        RowLayout.of(row_count, adapters, Ranks(rank, size), widths=WIDTHS, device=torch.device('cpu'))  # pyright: ignore[reportArgumentType] - only rank and size are used
        for rank in range(size)
    ]


def spans_of(*bounds: tuple[int, int]) -> list[AdapterSpan]:
    weights = [LoraWeights.create(LAYERS, LoraConfig(r=2), seed=seed) for seed in range(len(bounds))]
    return [
        AdapterSpan(begin, end, own, RowDropout(0.3, seed=begin))
        for (begin, end), own in zip(bounds, weights, strict=True)
    ]


@pytest.mark.parametrize('size', [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    'bounds',
    [[(0, 50)], [(0, 1), (1, 2), (2, 45), (45, 50)], [(3, 20), (31, 33)], []],
    ids=['one', 'four', 'gaps', 'none'],
)
def test_ranks_run_every_row_once(size: int, bounds: list[tuple[int, int]]) -> None:
    """The joined and ordered rows of all ranks are the rows of the pass, and each adapter keeps its rows."""
    adapters, rows = spans_of(*bounds), torch.arange(1, 51)
    found = layouts_of(50, adapters, size=size)
    joined = torch.cat([layout.own(rows) for layout in found])
    assert torch.equal(joined[found[0].order_T], rows)
    assert len({layout.row_count for layout in found}) == 1
    assert all(torch.equal(layout.order_T, found[0].order_T) for layout in found)
    assert int((joined == 0).sum()) == size * found[0].row_count - 50, 'the rest is padding'
    for span in adapters:
        own = [
            layout.own(rows)[part.begin_row : part.end_row]
            for layout in found
            for part in layout.adapters
            if part.adapter is span.adapter
        ]
        assert torch.equal(torch.cat(own), rows[span.begin_row : span.end_row])


def test_rows_of_an_adapter_do_not_depend_on_the_other_adapters() -> None:
    """A rank runs the same rows of an adapter, wherever these rows are in a pass."""
    for rank in range(3):
        alone = layouts_of(20, spans_of((0, 20)), size=3)[rank]
        beside = layouts_of(57, spans_of((0, 7), (7, 30), (30, 50), (50, 57)), size=3)[rank]
        chosen = (beside.own_R >= 30) & (beside.own_R < 50)
        assert torch.equal(beside.own_R[chosen] - 30, alone.own_R)


@pytest.mark.parametrize('row_count', [1, 5, 16, 50])
def test_masks_are_those_of_one_process(row_count: int) -> None:
    """Together, ranks drop the elements that a single process drops, even for adapters with few rows."""
    (span,) = spans_of((0, row_count))
    assert span.dropout is not None
    # A layer pads few rows before it applies the mask.
    padded = torch.ones(max(row_count, 16), 8)
    whole = span.dropout.mask(padded, layer=3)[:row_count]
    parts: list[torch.Tensor] = []
    for layout in layouts_of(row_count, [span], size=3):
        for part in layout.adapters:
            assert part.dropout is not None
            count = part.end_row - part.begin_row
            mask = part.dropout.mask(torch.ones(max(count, 16), 8), layer=3)
            assert not mask[count:].any(), 'padding is dropped'
            parts.append(mask[:count])
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize('size', [2, 5])
def test_the_number_of_rows_of_a_rank_is_known_before_a_pass(size: int) -> None:
    """The reported padding of a pass equals the padding of its layout."""
    for bounds in ([(0, 1), (1, 3), (3, 40)], [(0, 60), (60, 61)]):
        layout = layouts_of(bounds[-1][1], spans_of(*bounds), size=size)[0]
        assert rank_row_count([end - begin for begin, end in bounds], size, WIDTHS) == layout.row_count
