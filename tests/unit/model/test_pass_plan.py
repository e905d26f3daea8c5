"""Tests of the queue that plans passes."""

import random

import pytest

from twinkle.model.engine.pass_plan import PassPlanner, Slot


def plan(items, *, max_rows):
    """Return all passes for items that are given as lists of part sizes."""
    planner = PassPlanner(max_rows=max_rows)
    for index, sizes in enumerate(items):
        planner.add(index, sizes)
    passes = []
    while slots := planner.next_pass():
        passes.append(slots)
    return passes


def test_first_parts_go_first_and_share_a_pass():
    """First parts of all items share a pass, and the remaining parts of a large item follow."""
    assert plan([[10, 10, 4], [3], [5]], max_rows=18) == [
        [Slot(0, 0), Slot(1, 0), Slot(2, 0)], [Slot(0, 1)], [Slot(0, 2)],
    ]  # fmt: skip


def test_part_that_does_not_fit_is_first_in_the_next_pass():
    """If a part does not fit, the next item uses the remaining capacity, and the part is first in the next pass."""
    assert plan([[12], [12, 1], [6, 6]], max_rows=18) == [
        [Slot(0, 0), Slot(2, 0)], [Slot(1, 0), Slot(2, 1)], [Slot(1, 1)],
    ]  # fmt: skip


def test_large_part_runs_alone():
    """A part larger than a pass runs alone, after the smaller parts that fit before it."""
    assert plan([[3], [50], [3]], max_rows=10) == [[Slot(0, 0), Slot(2, 0)], [Slot(1, 0)]]


def test_items_that_have_begun_continue_after_new_ones():
    """Items that have begun continue with their next part, after items with fewer completed parts."""
    planner = PassPlanner(max_rows=8)
    planner.add(0, [9, 4, 5], next_part=1)
    planner.add(1, [4])
    assert planner.next_pass() == [Slot(0, 1), Slot(1, 0)]
    planner.add(2, [5])
    assert planner.next_pass() == [Slot(2, 0)]
    assert planner.next_pass() == [Slot(0, 2)]
    assert planner.next_pass() == []


@pytest.mark.parametrize('seed', range(60))
def test_every_part_runs_once_in_order_within_bounds(seed):
    """Every part runs once, the parts of an item run in order in different passes, and shared passes obey the limit."""
    rng = random.Random(seed)
    limit = rng.randint(1, 40)
    items = [[rng.randint(1, 50) for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 8))]
    passes = plan(items, max_rows=limit)
    for index, sizes in enumerate(items):
        assert [slot.part for slots in passes for slot in slots if slot.item == index] == list(range(len(sizes)))
    for slots in passes:
        assert len({slot.item for slot in slots}) == len(slots)
        assert slots == sorted(slots)
        assert len(slots) == 1 or sum(items[slot.item][slot.part] for slot in slots) <= limit


@pytest.mark.parametrize('seed', range(20))
def test_passes_are_full(seed):
    """If an item is absent from a pass, its next part would not fit into that pass."""
    rng = random.Random(seed)
    items = [[rng.randint(1, 10) for _ in range(rng.randint(1, 4))] for _ in range(6)]
    done = [0] * len(items)
    for slots in plan(items, max_rows=16):
        free_tokens = 16 - sum(items[slot.item][slot.part] for slot in slots)
        absent = [
            index for index in range(6) if done[index] < len(items[index]) and index not in {s.item for s in slots}
        ]
        assert all(items[index][done[index]] > free_tokens for index in absent)
        for slot in slots:
            done[slot.item] += 1
