"""Sampling the next batch while the last one trains."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from twinkle.rollout.errors import PipelineClosed
from twinkle.rollout.raised import Raised

_Prompts = TypeVar('_Prompts')
_Samples = TypeVar('_Samples')


@dataclass(frozen=True, kw_only=True)
class PipelineBatch(Generic[_Prompts, _Samples]):
    """A batch that was sampled."""

    index: int
    """From 0, in the order of the prompts."""
    prompts: _Prompts
    samples: _Samples
    sync_count: int
    """Syncs before it was sampled; the first is 1."""
    staleness: int
    """Syncs since then: how many trained batches its weights did not see."""


class AsyncPipeline(Generic[_Prompts, _Samples]):
    """Yields batches in order; while one trains, the next is sampled in a thread.

    A batch counts as trained when the next one is asked for. Then `sync` runs, in the caller's thread and never
    beside `sample`, so a sampler that is for one thread at a time will do. `sync` also runs before the first batch
    and after the last.

    Batch `n` is sampled with the weights that `max(0, n - max_staleness)` batches trained, neither older nor
    newer, whatever the speeds: a loop with a seed gives the same numbers each time. The price is that a sync waits
    for the sampling under way. With 0 nothing runs beside anything; from 1 on a step takes as long as the slower of
    both; more than 1 makes samples older and gains nothing, unless `is_ordered` is False.

    Use it as a context manager, or call `close`.

    Args:
        sample: returns the samples of a batch: `sample(index, prompts)`. Runs in the pipeline's thread.
        prompts: batches of prompts; read in the pipeline's thread, at most `max_staleness + 1` ahead.
        sync: gives the sampler the trainer's weights.
        max_staleness: most syncs between a batch's sampling and its training; at least 0.
        is_ordered: False: a sync does not wait for batches that are not begun, which are then sampled with newer
            weights than they might be. Uneven steps cost less; which weights sampled what depends on time.

    Raises:
        ValueError: `max_staleness` is negative.

    Concurrency: for one thread.
    """

    def __init__(
        self,
        sample: Callable[[int, _Prompts], _Samples],
        prompts: Iterable[_Prompts],
        *,
        sync: Callable[[], object],
        max_staleness: int = 1,
        is_ordered: bool = True,
    ) -> None:
        if max_staleness < 0:
            raise ValueError(f'max_staleness must be at least 0, got {max_staleness}')
        self._sample, self._prompts, self._sync = sample, prompts, sync
        self._ahead, self._is_ordered = max_staleness, is_ordered
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name='rollout-pipeline', daemon=True)
        self._ready: deque[PipelineBatch[_Prompts, _Samples]] = deque()
        self._sync_count = 0
        self._sampled_count = 0
        self._yielded_count = 0
        self._is_sampling = self._is_exhausted = self._is_closed = False
        self._error: BaseException | None = None

    def __enter__(self) -> 'AsyncPipeline[_Prompts, _Samples]':
        """Return itself; leaving closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[PipelineBatch[_Prompts, _Samples]]:
        """Return itself: batches are yielded once."""
        return self

    def __next__(self) -> PipelineBatch[_Prompts, _Samples]:
        """Take the batch before as trained, sync, and return the next one.

        Raises:
            StopIteration: the prompts are at their end, and all were trained.
            PipelineClosed: `close` was called.
            Whatever `prompts`, `sample` or `sync` raised; batches sampled before are yielded first.
        """
        with self._changed:
            if self._is_closed:
                raise PipelineClosed
            if self._sync_count <= self._yielded_count and not self._is_failed_and_empty():
                self._sync_in_turn()
            if self._thread.ident is None:
                self._thread.start()
            self._changed.wait_for(lambda: self._ready or self._error or self._is_exhausted)
            if self._ready:
                batch = self._ready.popleft()
                self._yielded_count += 1
                return _aged(batch, self._sync_count)
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """End the thread, after the sampling under way. Twice is no error."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _is_failed_and_empty(self) -> bool:
        return self._error is not None and not self._ready

    def _sync_in_turn(self) -> None:
        """Sync between two samplings; ordered, between the very two that this sync belongs between."""
        wanted = self._yielded_count + self._ahead if self._is_ordered and self._thread.ident else 0
        self._changed.wait_for(
            lambda: not self._is_sampling and (self._sampled_count >= wanted or self._is_exhausted or self._error)
        )
        if self._is_failed_and_empty():
            return
        # The lock is kept: no sampling begins meanwhile.
        self._sync()
        self._sync_count += 1
        self._changed.notify_all()

    def _run(self) -> None:
        raised = Raised()
        with raised:
            for index, prompts in enumerate(self._prompts):
                if not self._run_one(index, prompts):
                    break
        with self._changed:
            self._error = raised.error
            self._is_sampling, self._is_exhausted = False, True
            self._changed.notify_all()

    def _run_one(self, index: int, prompts: _Prompts) -> bool:
        """Sample a batch once its turn has come; return whether to go on."""
        with self._changed:
            # One sync comes before all training, so n trained batches are n + 1 syncs.
            self._changed.wait_for(lambda: self._is_closed or self._sync_count > index - self._ahead)
            if self._is_closed:
                return False
            self._is_sampling, sync_count = True, self._sync_count
        samples = self._sample(index, prompts)
        with self._changed:
            batch = PipelineBatch(index=index, prompts=prompts, samples=samples, sync_count=sync_count, staleness=0)
            self._ready.append(batch)
            self._sampled_count += 1
            self._is_sampling = False
            self._changed.notify_all()
        return True


def _aged(batch: PipelineBatch[_Prompts, _Samples], sync_count: int) -> PipelineBatch[_Prompts, _Samples]:
    """Return the batch with its age."""
    return PipelineBatch(
        index=batch.index,
        prompts=batch.prompts,
        samples=batch.samples,
        sync_count=batch.sync_count,
        staleness=sync_count - batch.sync_count,
    )
