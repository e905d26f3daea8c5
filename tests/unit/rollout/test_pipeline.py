"""Unit tests of `AsyncPipeline`: order, staleness, errors and closing."""

import signal
import threading
from collections.abc import Iterator

import pytest

from twinkle.rollout import AsyncPipeline, PipelineClosed


class Loop:
    """A fake trainer and sampler. Every batch contains the number of the weights that sampled it."""

    def __init__(self) -> None:
        self.trained = 0
        self.weights = -1
        self.sync_threads: set[int] = set()
        self.sample_threads: set[int] = set()
        self.is_sampling = False

    def sync(self) -> None:
        """Copy the trainer's weights to the sampler."""
        assert not self.is_sampling
        self.sync_threads.add(threading.get_ident())
        self.weights = self.trained

    def sample(self, index: int, prompts: str) -> tuple[int, str, int]:
        """Return the arguments and the number of the current weights."""
        self.is_sampling = True
        self.sample_threads.add(threading.get_ident())
        samples = index, prompts, self.weights
        self.is_sampling = False
        return samples


@pytest.mark.parametrize('max_staleness', [0, 1, 3])
def test_batches_are_sampled_with_the_documented_weights(max_staleness):
    """Batch n is sampled with the weights after max(0, n - max_staleness) trained batches."""
    for _ in range(5):
        loop = Loop()
        with AsyncPipeline(loop.sample, 'abcdef', sync=loop.sync, max_staleness=max_staleness) as pipeline:
            for batch in pipeline:
                assert batch.samples == (batch.index, 'abcdef'[batch.index], max(0, batch.index - max_staleness))
                assert batch.staleness == min(batch.index, max_staleness) <= max_staleness
                loop.trained += 1
        assert loop.trained == loop.weights == 6
        assert loop.sync_threads == {threading.get_ident()}
        assert len(loop.sample_threads) == 1
        assert loop.sample_threads != loop.sync_threads


def test_unordered_batches_are_never_older_than_the_limit():
    """The staleness of an unordered batch is at most `max_staleness`."""
    loop = Loop()
    with AsyncPipeline(loop.sample, range(50), sync=loop.sync, max_staleness=3, is_ordered=False) as pipeline:
        for batch in pipeline:
            assert loop.trained - batch.samples[2] == batch.staleness <= 3
            loop.trained += 1
    assert loop.trained == 50


def test_the_next_batch_is_sampled_while_the_last_one_trains():
    """Sampling of the next batch starts before the training on the current batch ends."""
    loop, begun = Loop(), [threading.Event() for _ in range(4)]

    def sample(index: int, prompts: int) -> int:
        begun[index].set()
        return prompts

    with AsyncPipeline(sample, range(4), sync=loop.sync, max_staleness=1) as pipeline:
        for batch in pipeline:
            assert begun[min(batch.index + 1, 3)].wait(timeout=60)


def test_with_no_staleness_nothing_runs_in_parallel():
    """Sampling with `max_staleness` 0 starts only after the previous batch is trained."""
    loop, begun = Loop(), []

    def sample(index: int, prompts: int) -> int:
        begun.append((index, loop.trained))
        return prompts

    with AsyncPipeline(sample, range(4), sync=loop.sync, max_staleness=0) as pipeline:
        for _ in pipeline:
            loop.trained += 1
    assert begun == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_an_error_of_the_sampler_follows_the_batches_before_it():
    """An error of `sample` is raised after the earlier batches, and again at each later call."""

    def sample(index: int, prompts: int) -> int:
        if index == 2:
            raise KeyError('lost')
        return prompts

    seen = []
    with AsyncPipeline(sample, range(9), sync=lambda: None, max_staleness=1) as pipeline:
        with pytest.raises(KeyError):
            seen += [batch.index for batch in _recording(pipeline, seen)]
        with pytest.raises(KeyError):
            next(pipeline)
    assert seen == [0, 1]


def _recording(pipeline: AsyncPipeline, seen: list[int]) -> Iterator:
    for batch in pipeline:
        seen.append(batch.index)
        yield batch


def test_errors_of_prompts_and_sync_are_raised_too():
    """Errors of `prompts` and `sync` reach the caller."""

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


def test_closing_stops_the_thread():
    """A pipeline can be closed at any point and repeatedly; reading it then raises PipelineClosed."""
    for read_count in range(4):
        before = set(threading.enumerate())
        pipeline = AsyncPipeline(lambda index, prompt: prompt, range(3), sync=lambda: None)
        for _ in range(read_count):
            next(pipeline)
        pipeline.close()
        pipeline.close()
        assert set(threading.enumerate()) <= before
        with pytest.raises(PipelineClosed):
            next(pipeline)


def test_prompts_are_read_at_most_one_batch_ahead_of_the_limit():
    """The number of prompts read ahead is bounded by `max_staleness`."""
    read: list[int] = []

    def prompts() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    with AsyncPipeline(lambda index, prompt: prompt, prompts(), sync=lambda: None, max_staleness=2) as pipeline:
        for batch in pipeline:
            # The batch after the limit is read before its sampling has to wait.
            assert len(read) <= batch.index + 2 + 2
            if batch.index == 5:
                break


def test_a_negative_limit_is_refused():
    """A negative `max_staleness` raises ValueError."""
    with pytest.raises(ValueError):  # noqa: PT011 (there is no dedicated error)
        AsyncPipeline(lambda index, prompt: prompt, [1], sync=lambda: None, max_staleness=-1)


def test_interrupt_that_the_thread_receives_ends_the_wait() -> None:
    """Ctrl-C ends the wait for a batch even if the pipeline's thread receives the signal."""
    continued = threading.Event()

    def sample(index: int, prompts: str) -> str:
        del index
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        continued.wait()
        return prompts

    pipeline = AsyncPipeline(sample, 'a', sync=lambda: None)
    with pytest.raises(KeyboardInterrupt):
        next(pipeline)
    continued.set()
    pipeline.close()
