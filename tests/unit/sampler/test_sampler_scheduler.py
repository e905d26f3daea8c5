"""Unit tests of the torch engine's scheduler: limits, order and progress."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.data_format import SamplingParams
from twinkle.sampler.engine.request import EngineRequest
from twinkle.sampler.engine.scheduler import Scheduler, SchedulerLimits
from twinkle.sampler.engine.sequence import SampleGroup, Sequence

LIMITS = SchedulerLimits(max_sequences=4, max_step_rows=12, prefill_chunk_rows=8, cache_budget_bytes=64)


def make_group(name: str, prompt_length: int, sample_count: int, max_new_tokens: int) -> SampleGroup:
    """Return a group of sequences with the given sizes; their caches need one byte per token."""
    request = EngineRequest(request_id=name, prompt_token_ids=(1,) * prompt_length, params=SamplingParams())
    return SampleGroup(
        request=request,
        sample_indices=range(sample_count),
        max_new_tokens=max_new_tokens,
        seed=0,
        cache_bytes_per_sample=prompt_length + max_new_tokens,
    )


def run_step(scheduler: Scheduler) -> list[tuple[str, int]]:
    """Execute one planned step as the engine does; return `(request_id, rows)` of the computed rows."""
    plan = scheduler.schedule()
    assert plan.row_count <= scheduler.limits.max_step_rows
    done = [(sequence.group.request.request_id, 1) for sequence in plan.decodes]
    for sequence in plan.decodes:
        grow(scheduler, sequence)
    for chunk in plan.prefills:
        done.append((chunk.group.request.request_id, chunk.end - chunk.begin))
        chunk.group.computed_tokens = chunk.end
        if chunk.group.is_prompt_computed:
            start(scheduler, chunk.group)
    return done


def start(scheduler: Scheduler, group: SampleGroup) -> None:
    """Add the first token of each sample to a computed group."""
    count = group.sample_count if group.max_new_tokens else 0
    sequences = [Sequence(group=group, index=i, cache=None, rules=None, stop_detector=None) for i in range(count)]
    scheduler.start(group, sequences)
    for sequence in sequences:
        grow(scheduler, sequence)


def grow(scheduler: Scheduler, sequence: Sequence) -> None:
    """Add a token to a sequence, and end it at its limit."""
    sequence.tokens.append(0)
    if len(sequence.tokens) == sequence.group.max_new_tokens:
        scheduler.finish(sequence)


def stored_bytes(scheduler: Scheduler) -> int:
    """Return the memory of all tokens that are stored."""
    running = sum(len(s.tokens) + s.group.prompt_length for s in scheduler.running)
    return running + sum(group.computed_tokens for group in scheduler.prefilling)


sizes = st.tuples(st.integers(1, 20), st.integers(1, 3), st.integers(0, 10))


@given(arrivals=st.lists(st.lists(sizes, max_size=3), max_size=6), leaving=st.sets(st.integers(0, 17)))
def test_limits_hold_and_all_requests_finish(arrivals, leaving):
    """Rows, sequences and memory stay within their limits in each step, and every request finishes."""
    scheduler = Scheduler(LIMITS)
    waves = [*arrivals, *[[] for _ in range(400)]]
    count = 0
    groups: list[SampleGroup] = []
    for wave in waves:
        for prompt_length, sample_count, max_new_tokens in wave:
            fitting = min(sample_count, scheduler.largest_group(prompt_length + max_new_tokens))
            groups.append(make_group(str(count), prompt_length, fitting, max_new_tokens))
            scheduler.add(groups[-1])
            count += 1
        run_step(scheduler)
        assert len(scheduler.running) + len(scheduler.prefilling) <= LIMITS.max_sequences
        assert stored_bytes(scheduler) <= scheduler.cache_bytes_reserved <= LIMITS.cache_budget_bytes
        for group in [g for g in groups if int(g.request.request_id) in leaving and g in scheduler.prefilling]:
            scheduler.remove_group(group)
    assert not scheduler.waiting
    assert not scheduler.prefilling
    assert not scheduler.running
    assert scheduler.cache_bytes_reserved == 0


def test_groups_are_admitted_in_order_of_arrival():
    """A small group does not overtake a large group that waits for memory."""
    scheduler = Scheduler(LIMITS)
    scheduler.add(make_group('first', 10, 3, 10))
    scheduler.add(make_group('large', 20, 2, 10))
    scheduler.add(make_group('small', 1, 1, 1))
    scheduler.schedule()
    assert [group.request.request_id for group in scheduler.prefilling] == ['first']


def test_chunk_boundaries_do_not_depend_on_other_requests():
    """A prompt is split at the same positions with and without other requests."""

    def chunks(scheduler: Scheduler) -> list[int]:
        rows: list[int] = []
        while scheduler.waiting or scheduler.prefilling or scheduler.running:
            rows += [count for name, count in run_step(scheduler) if name == 'it'][:1]
        return rows

    alone, shared = Scheduler(LIMITS), Scheduler(LIMITS)
    for name in ('a', 'b'):
        shared.add(make_group(name, 5, 1, 7))
    alone.add(make_group('it', 19, 1, 1))
    shared.add(make_group('it', 19, 1, 1))
    assert chunks(alone) == chunks(shared) == [8, 8, 3]


def test_parked_sequences_keep_their_memory_and_are_not_computed():
    """A parked group gets no rows and keeps its reserved memory."""
    scheduler = Scheduler(LIMITS)
    group = make_group('it', 4, 1, 8)
    scheduler.add(group)
    run_step(scheduler)
    reserved = scheduler.cache_bytes_reserved
    group.is_parked = True
    assert run_step(scheduler) == []
    assert scheduler.cache_bytes_reserved == reserved
    group.is_parked = False
    assert run_step(scheduler) == [('it', 1)]


def test_limits_that_starve_prompts_are_refused():
    """Limits raise ValueError if they leave too few rows for a prompt chunk while all sequences run."""
    with pytest.raises(ValueError, match='max_step_rows'):
        SchedulerLimits(max_sequences=8, max_step_rows=10, prefill_chunk_rows=4, cache_budget_bytes=64)
