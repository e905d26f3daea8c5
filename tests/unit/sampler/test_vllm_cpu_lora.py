"""LoRA in vLLM's layers on a CPU: each row gets its adapter's update, for any rank, part and number of rows."""

from types import SimpleNamespace

import pytest
import torch

from twinkle.sampler.vllm.cpu_lora import (
    FEW_ROWS,
    LayerFactors,
    adapter_rows,
    add_lora_linear,
    discard_factors,
    own_rank,
    set_rows,
)

MAX_RANK, INPUTS, WIDTHS = 4, 6, (5, 3)


class Wrapper:
    """The part of vLLM's LoRA wrapper that the module uses."""

    def __init__(self, slots_T: torch.Tensor) -> None:
        set_rows(self, slots_T)


def stacks(
    *ranks: int, dtype: torch.dtype = torch.float32
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return random factors, with one slot per rank; unused rows and columns are 0, as in vLLM's stacks."""
    generator = torch.Generator().manual_seed(0)
    a = tuple(torch.randn(len(ranks), 1, MAX_RANK, INPUTS, generator=generator).to(dtype) for _ in WIDTHS)
    b = tuple(torch.randn(len(ranks), 1, width, MAX_RANK, generator=generator).to(dtype) for width in WIDTHS)
    for slot, rank in enumerate(ranks):
        for first, second in zip(a, b, strict=True):
            first[slot, 0, rank:] = 0
            second[slot, 0, :, rank:] = 0
    return a, b


def expected_of(y, x, slots, a, b):
    """Return the sum of `y` and the updates, computed row by row in float64."""
    rows = y.double()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            updates = [
                x[row].double() @ a[part][slot, 0].double().t() @ b[part][slot, 0].double().t() for part in (0, 1)
            ]
            rows[row] += torch.cat(updates)
    return rows


def test_rows_of_the_base_model_are_in_no_group():
    """Each adapter gets its rows, contiguous or not; rows with slot -1 belong to no adapter."""
    groups = {slot: (count, rows) for slot, count, rows in adapter_rows(torch.tensor([-1, 2, 2, 0, -1, 0]))}
    assert groups.keys() == {0, 2}
    assert groups[2] == (2, slice(1, 3))
    assert groups[0][1].tolist() == [3, 5]
    assert adapter_rows(torch.tensor([-1, -1])) == []


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    'slots', [[1, -1, 0, 1, -1], [0], [2] * 7 + [-1], [0] * FEW_ROWS + [1], [0, 1, -1] * (FEW_ROWS + 1)]
)
def test_each_row_gets_the_update_of_its_adapter(slots: list[int], dtype: torch.dtype):
    """Rows get the updates of a float64 computation, and rows of the base model are bitwise unchanged."""
    a, b = stacks(1, 3, MAX_RANK, dtype=dtype)
    slots_T = torch.tensor(slots)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(slots), INPUTS, generator=generator).to(dtype)
    y = torch.randn(len(slots), sum(WIDTHS), generator=generator).to(dtype)
    expected, before = expected_of(y, x, slots_T, a, b), y.clone()
    add_lora_linear(Wrapper(slots_T), y, x, a, b, 1.0, WIDTHS)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(y[slots_T < 0], before[slots_T < 0])


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    'slots', [[0, 1, 2, 3], [3, -1, 0, 1, 0, 3, 1, 2], [2, 2, 1, 1, 3, -1, 3, 0], [0, 0, 1, 1, 2, 3]]
)
def test_several_adapters_share_batched_products(slots: list[int], dtype: torch.dtype):
    """Adapters of equal shapes are multiplied together, and each row gets the same update as alone."""
    a, b = stacks(3, 3, 3, 3, dtype=dtype)
    slots_T = torch.tensor(slots)
    x, y = torch.randn(len(slots), INPUTS).to(dtype), torch.randn(len(slots), sum(WIDTHS)).to(dtype)
    separate, before = y.clone(), y.clone()
    wrapper = Wrapper(slots_T)
    add_lora_linear(wrapper, y, x, a, b, 1.0, WIDTHS)
    assert [stack is not None for stack in wrapper.twinkle_stacks.values()] == [True]
    for slot in set(slots) - {-1}:
        add_lora_linear(Wrapper(torch.where(slots_T == slot, slot, -1)), separate, x, a, b, 1.0, WIDTHS)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(y, separate, rtol=tolerance, atol=tolerance)
    assert torch.equal(y[slots_T < 0], before[slots_T < 0])


def test_adapters_that_finish_leave_the_others_stacked():
    """The adapters that remain in a batch keep their copies, and a new adapter is added with its factors."""
    a, b = stacks(2, 2, 2, 2, 2, 2)
    wrapper = Wrapper(torch.arange(5))
    kept: list[object] = []
    for slots in ([0, 1, 2, 3, 4], [3, 1, 4, 0], [0, 1, 2, 3, 4, 5], [5, 5, 0, 0, 2, 2, 1, 1]):
        set_rows(wrapper, torch.tensor(slots))
        y, x = torch.zeros(len(slots), sum(WIDTHS)), torch.randn(len(slots), INPUTS)
        add_lora_linear(wrapper, y, x, a, b, 1.0, WIDTHS)
        expected = expected_of(torch.zeros_like(y), x, torch.tensor(slots), a, b)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
        kept.append(next(iter(wrapper.twinkle_stacks.values())))
    assert kept[0] is kept[1]
    assert kept[1] is not kept[2]


def test_unequal_adapters_are_multiplied_separately():
    """Adapters of different ranks or parts, few adapters, and unequal numbers of rows use no batched product."""
    a, b = stacks(3, 2, 3, 3, 3, 3)
    b[1][3].zero_()
    for slots in ([0, 1, 2, 4], [0, 2, 3, 4], [0, 2, 4], [0] * 9 + [2, 4, 5]):
        wrapper = Wrapper(torch.tensor(slots))
        y, x = torch.zeros(len(slots), sum(WIDTHS)), torch.randn(len(slots), INPUTS)
        add_lora_linear(wrapper, y, x, a, b, 1.0, WIDTHS)
        assert [stack for stack in wrapper.twinkle_stacks.values() if stack is not None] == []
        expected = expected_of(torch.zeros_like(y), x, torch.tensor(slots), a, b)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_values_of_an_adapter_reach_no_other_adapter():
    """NaN or infinity in an adapter's factors or inputs affects only its own rows, even in padded batched products."""
    a, b = stacks(2, 2, 2, 2)
    a[0][1] = float('nan')
    slots = torch.tensor([1, 0, 2, 3, 0, 2])
    x = torch.randn(6, INPUTS)
    x[0] = float('inf')
    y = torch.zeros(6, sum(WIDTHS))
    add_lora_linear(Wrapper(slots), y, x, a, b, 1.0, WIDTHS)
    assert y[0].isnan().any()
    expected = expected_of(torch.zeros_like(y), x, torch.where(slots == 1, -1, slots), a, b)
    torch.testing.assert_close(y[1:].double(), expected[1:], rtol=1e-5, atol=1e-5)


def test_few_bfloat16_rows_are_rounded_once():
    """The update of few bfloat16 rows is computed in float32, so it differs from the exact update by one rounding."""
    a, b = stacks(MAX_RANK, dtype=torch.bfloat16)
    slots = torch.zeros(9, dtype=torch.long)
    x, y = torch.randn(9, INPUTS).bfloat16(), torch.randn(9, sum(WIDTHS)).bfloat16()
    expected = expected_of(y, x, slots, a, b)
    add_lora_linear(Wrapper(slots), y, x, a, b, 1.0, WIDTHS)
    assert (y.double() - expected).abs().max() <= expected.abs().max() * 2**-8


def test_parts_without_an_update_cost_nothing():
    """A part whose second factor is 0 is not copied, and an adapter without an update changes nothing."""
    a, b = stacks(2)
    b[1].zero_()
    assert [part.index for part in LayerFactors.of(0, a, b, WIDTHS).parts] == [0]
    b[0].zero_()
    y, x = torch.randn(3, sum(WIDTHS)), torch.randn(3, INPUTS)
    before = y.clone()
    add_lora_linear(Wrapper(torch.zeros(3, dtype=torch.long)), y, x, a, b, 1.0, WIDTHS)
    assert torch.equal(y, before)


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
@pytest.mark.parametrize('factor', ['a', 'b'])
def test_values_that_are_not_finite_are_not_hidden(value: float, factor: str):
    """A factor with NaN or infinity makes the rows of its adapter NaN or infinite, as in the trainer."""
    a, b = stacks(2)
    {'a': a, 'b': b}[factor][0][0, 0, 0, 0] = value
    if factor == 'a':
        b[0].zero_()
    y = torch.zeros(2, sum(WIDTHS))
    add_lora_linear(Wrapper(torch.tensor([0, -1])), y, torch.ones(2, INPUTS), a, b, 1.0, WIDTHS)
    assert not y[0, : WIDTHS[0]].isfinite().all()
    assert y[1].isfinite().all()


@pytest.mark.parametrize('slots', [[0, 1], [0, 1, 2, 3]])
def test_copies_are_discarded_with_the_content_of_a_slot(slots: list[int]):
    """Rows get the update of the slot's current adapter, after one slot or all slots are filled again."""
    a, b = stacks(2, 2, 2, 2)
    slots_T = torch.tensor(slots)
    wrapper = Wrapper(slots_T)
    manager = SimpleNamespace(punica_wrapper_mapping={'model': wrapper})
    x = torch.randn(len(slots), INPUTS)
    for slot in (0, None):
        add_lora_linear(wrapper, torch.zeros(len(slots), sum(WIDTHS)), x, a, b, 1.0, WIDTHS)
        discard_factors(manager, slot)
        a[0][0] *= 2
        y = torch.zeros(len(slots), sum(WIDTHS))
        add_lora_linear(wrapper, y, x, a, b, 1.0, WIDTHS)
        torch.testing.assert_close(y.double(), expected_of(torch.zeros_like(y), x, slots_T, a, b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('rank', range(MAX_RANK + 1))
def test_rank_of_a_slot_is_that_of_its_adapter(rank: int):
    """The nonzero rows and columns of a slot give the rank of its adapter."""
    a, b = stacks(rank)
    assert own_rank(a[0][0, 0], b[0][0, 0]) == rank
