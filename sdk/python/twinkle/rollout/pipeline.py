"""Sampling of the next batch while the caller trains on the current batch."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from twinkle.blocking import join, wait_until
from twinkle.component import ErrorCapture
from twinkle.rollout.errors import PipelineClosed

_Prompts = TypeVar('_Prompts')
_Samples = TypeVar('_Samples')


@dataclass(frozen=True, kw_only=True)
class PipelineBatch(Generic[_Prompts, _Samples]):
    """A sampled batch."""

    index: int
    """Position in `prompts`, from 0."""
    prompts: _Prompts
    samples: _Samples
    sync_count: int
    """Number of syncs before the batch was sampled, at least 1."""
    staleness: int
    """Number of trained batches, and therefore of syncs, since the batch was sampled."""


class AsyncPipeline(Generic[_Prompts, _Samples]):
    """Iterates over sampled batches in order, and samples the next batch in a thread while the caller trains.

    A request for the next batch marks the current batch as trained. The pipeline then calls `sync` in the caller's
    thread, never at the same time as `sample`, so the sampler need not be thread-safe. The pipeline also calls `sync`
    before the first batch and after the last batch.

    By default, batch `n` is sampled with the weights after exactly `max(0, n - max_staleness)` trained batches,
    independent of timing, so a seeded loop is reproducible. A sync waits until the sampling in progress has ended. With
    `max_staleness` 0, nothing runs in parallel. With 1, a step takes as long as the slower of sampling and training.
    Higher values only make samples older, unless `is_ordered` is False.

    Use the pipeline as a context manager, or call `close`.

    Args:
        sample: returns the samples of a batch: `sample(index, prompts)`. Runs in the pipeline's thread.
        prompts: batches of prompts; read in the pipeline's thread, at most `max_staleness + 1` ahead.
        sync: copies the trainer's weights to the sampler.
        max_staleness: maximum number of syncs between sampling a batch and training on it; at least 0.
        is_ordered: if False, a sync does not wait for batches whose sampling has not started; they are sampled with
            newer weights. This reduces the waiting if step times vary, but the weights of each batch depend on timing.

    Raises:
        ValueError: `max_staleness` is negative.

    Concurrency: one thread at a time.
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
        self._max_staleness, self._is_ordered = max_staleness, is_ordered
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name='rollout-pipeline', daemon=True)
        self._ready: deque[PipelineBatch[_Prompts, _Samples]] = deque()
        self._sync_count = 0
        self._sampled_count = 0
        self._yielded_count = 0
        self._is_sampling = self._is_exhausted = self._is_closed = False
        self._error: BaseException | None = None

    def __enter__(self) -> 'AsyncPipeline[_Prompts, _Samples]':
        """Return the pipeline; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[PipelineBatch[_Prompts, _Samples]]:
        """Return the pipeline; each batch is yielded once."""
        return self

    def __next__(self) -> PipelineBatch[_Prompts, _Samples]:
        """Mark the previous batch as trained, sync, and return the next batch.

        Errors of `prompts` and `sample` propagate after all batches sampled earlier were returned. Errors of `sync`
        propagate immediately.

        Raises:
            StopIteration: all batches were returned and trained.
            PipelineClosed: `close` was called.
        """
        with self._changed:
            if self._is_closed:
                raise PipelineClosed
            if self._sync_count <= self._yielded_count and not self._is_failed_and_empty():
                self._sync_between_batches()
            if self._thread.ident is None:
                self._thread.start()
            wait_until(self._changed, lambda: self._ready or self._error or self._is_exhausted)
            if self._ready:
                batch = self._ready.popleft()
                self._yielded_count += 1
                return _with_staleness(batch, self._sync_count)
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Stop the thread after the batch that is being sampled. Closing again has no effect."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            join(self._thread)

    def _is_failed_and_empty(self) -> bool:
        return self._error is not None and not self._ready

    def _sync_between_batches(self) -> None:
        """Sync while nothing is being sampled; in ordered mode, after all batches that must precede this sync."""
        required_count = self._yielded_count + self._max_staleness if self._is_ordered and self._thread.ident else 0
        wait_until(
            self._changed,
            lambda: (
                not self._is_sampling and (self._sampled_count >= required_count or self._is_exhausted or self._error)
            ),
        )
        if self._is_failed_and_empty():
            return
        # Holding the lock prevents sampling from starting during the sync.
        self._sync()
        self._sync_count += 1
        self._changed.notify_all()

    def _run(self) -> None:
        capture = ErrorCapture()
        with capture:
            for index, prompts in enumerate(self._prompts):
                if not self._run_one(index, prompts):
                    break
        with self._changed:
            self._error = capture.error
            self._is_sampling, self._is_exhausted = False, True
            self._changed.notify_all()

    def _run_one(self, index: int, prompts: _Prompts) -> bool:
        """Wait until the batch may be sampled, and sample it; return False if the pipeline was closed."""
        with self._changed:
            # The first sync precedes all training, so n trained batches correspond to n + 1 syncs.
            self._changed.wait_for(lambda: self._is_closed or self._sync_count > index - self._max_staleness)
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


def _with_staleness(batch: PipelineBatch[_Prompts, _Samples], sync_count: int) -> PipelineBatch[_Prompts, _Samples]:
    """Return a copy of the batch with its staleness."""
    return PipelineBatch(
        index=batch.index,
        prompts=batch.prompts,
        samples=batch.samples,
        sync_count=batch.sync_count,
        staleness=sync_count - batch.sync_count,
    )
