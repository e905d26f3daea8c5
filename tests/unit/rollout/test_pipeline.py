"""Sampling beside training: order, age, errors and the end."""

import threading
from collections.abc import Iterator

import pytest

from twinkle.rollout import AsyncPipeline, PipelineClosed


class Loop:
    """A trainer and a sampler that only count; every batch notes the weights that sampled it."""

    def __init__(self) -> None:
        self.trained = 0
        self.weights = -1
        self.sync_threads: set[int] = set()
        self.sample_threads: set[int] = set()
        self.is_sampling = False

    def sync(self) -> None:
        """Give the sampler what was trained."""
        assert not self.is_sampling
        self.sync_threads.add(threading.get_ident())
        self.weights = self.trained

    def sample(self, index: int, prompts: str) -> tuple[int, str, int]:
        """Draw with the weights of now."""
        self.is_sampling = True
        self.sample_threads.add(threading.get_ident())
        drawn = index, prompts, self.weights
        self.is_sampling = False
        return drawn


@pytest.mark.parametrize('ahead', [0, 1, 3])
def test_batches_come_in_order_with_the_weights_they_must_have(ahead):
    """Batch n has those that n - ahead batches trained, every time."""
    for _ in range(5):
        loop = Loop()
        with AsyncPipeline(loop.sample, 'abcdef', sync=loop.sync, max_staleness=ahead) as pipeline:
            for batch in pipeline:
                assert batch.samples == (batch.index, 'abcdef'[batch.index], max(0, batch.index - ahead))
                assert batch.staleness == min(batch.index, ahead) <= ahead
                loop.trained += 1
        assert loop.trained == loop.weights == 6
        assert loop.sync_threads == {threading.get_ident()}
        assert len(loop.sample_threads) == 1
        assert loop.sample_threads != loop.sync_threads


def test_unordered_batches_are_never_older_than_the_bound():
    """They may be younger than ordered ones."""
    loop = Loop()
    with AsyncPipeline(loop.sample, range(50), sync=loop.sync, max_staleness=3, is_ordered=False) as pipeline:
        for batch in pipeline:
            assert loop.trained - batch.samples[2] == batch.staleness <= 3
            loop.trained += 1
    assert loop.trained == 50


def test_the_next_batch_is_sampled_while_the_last_one_trains():
    """Training waits here for a sampling that begins only beside it."""
    loop, begun = Loop(), [threading.Event() for _ in range(4)]

    def sample(index: int, prompts: int) -> int:
        begun[index].set()
        return prompts

    with AsyncPipeline(sample, range(4), sync=loop.sync, max_staleness=1) as pipeline:
        for batch in pipeline:
            assert begun[min(batch.index + 1, 3)].wait(timeout=60)


def test_with_no_staleness_nothing_runs_ahead():
    """A batch is not even begun before the one before is trained."""
    loop, begun = Loop(), []

    def sample(index: int, prompts: int) -> int:
        begun.append((index, loop.trained))
        return prompts

    with AsyncPipeline(sample, range(4), sync=loop.sync, max_staleness=0) as pipeline:
        for _ in pipeline:
            loop.trained += 1
    assert begun == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_an_error_of_the_sampler_comes_after_the_batches_before_it():
    """In the trainer's thread, again at each further call; the thread has ended."""

    def sample(index: int, prompts: int) -> int:
        if index == 2:
            raise KeyError('lost')
        return prompts

    seen = []
    with AsyncPipeline(sample, range(9), sync=lambda: None, max_staleness=1) as pipeline:
        with pytest.raises(KeyError):
            seen += [batch.index for batch in _noted(pipeline, seen)]
        with pytest.raises(KeyError):
            next(pipeline)
    assert seen == [0, 1]


def _noted(pipeline: AsyncPipeline, seen: list[int]) -> Iterator:
    for batch in pipeline:
        seen.append(batch.index)
        yield batch


def test_errors_of_prompts_and_sync_are_raised_too():
    """Whatever of the caller's own fails."""

    def prompts() -> Iterator[int]:
        yield 1
        raise KeyError('no more')

    def fail() -> None:
        raise LookupError('no weights')

    with AsyncPipeline(lambda index, prompt: prompt, prompts(), sync=lambda: None) as pipeline:
        assert next(pipeline).samples == 1
        with pytest.raises(KeyError):
            next(pipeline)
    with AsyncPipeline(lambda index, prompt: prompt, [1], sync=fail) as pipeline, pytest.raises(LookupError):
        next(pipeline)


def test_closing_ends_the_thread_wherever_it_is():
    """Never begun, in the middle, at the end, twice; afterwards there are no batches."""
    for taken in range(4):
        before = set(threading.enumerate())
        pipeline = AsyncPipeline(lambda index, prompt: prompt, range(3), sync=lambda: None)
        for _ in range(taken):
            next(pipeline)
        pipeline.close()
        pipeline.close()
        assert set(threading.enumerate()) <= before
        with pytest.raises(PipelineClosed):
            next(pipeline)


def test_prompts_are_read_no_further_than_the_bound():
    """What is made ahead is bounded, however fast the sampler."""
    read: list[int] = []

    def prompts() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    with AsyncPipeline(lambda index, prompt: prompt, prompts(), sync=lambda: None, max_staleness=2) as pipeline:
        for batch in pipeline:
            # The one behind the bound is read to wait for its turn.
            assert len(read) <= batch.index + 2 + 2
            if batch.index == 5:
                break


def test_a_negative_bound_is_refused():
    """Nothing is sampled before its weights."""
    with pytest.raises(ValueError):  # noqa: PT011 (a bound is not a fact of its own)
        AsyncPipeline(lambda index, prompt: prompt, [1], sync=lambda: None, max_staleness=-1)
