"""Waits that a signal ends, such as that of Ctrl-C, also for coroutines in the loop of another thread.

A signal wakes a waiting thread only if the thread itself receives it, and is already asleep. If another thread receives
it, or it arrives while the thread is about to sleep, Python runs the handler after the wait. Therefore the waits of
this module have several parts. Waits of less than a second, and waits in threads that run no handlers, do not need
them.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import Context
from typing import Any, Protocol, TypeVar

__all__ = [
    'join',
    'next_item',
    'result_of',
    'results_of',
    'run_in',
    'run_until_done',
    'start_in',
    'wait_for',
    'wait_for_all',
    'wait_until',
]

_Result = TypeVar('_Result')
_Item = TypeVar('_Item')
_Item_co = TypeVar('_Item_co', covariant=True)

_INTERRUPT_SECONDS = 0.5
"""Longest time after which a waiting thread handles a signal that did not wake it."""


class _Queue(Protocol[_Item_co]):
    """A queue of the module `queue`."""

    def get(self, *, timeout: float) -> _Item_co: ...


def result_of(future: Future[_Result]) -> _Result:
    """Wait for a future and return its result."""
    while True:
        try:
            return future.result(_INTERRUPT_SECONDS)
        except TimeoutError:
            # The future may have raised it.
            if future.done():
                return future.result()


def results_of(futures: Sequence[Future[_Result]]) -> list[_Result]:
    """Wait for futures and return their results in order.

    If one of them raises an error, or a signal ends the wait, work that has not started is cancelled.
    """
    try:
        return [result_of(future) for future in futures]
    finally:
        for future in futures:
            future.cancel()


def wait_for_all(futures: Iterable[Future[Any]], timeout: float | None = None) -> bool:
    """Wait until futures are done, and return whether they were done within `timeout` seconds; None: no limit."""
    pending = list(futures)
    return any(not wait(pending, seconds).not_done for seconds in _parts(timeout))


def join(thread: threading.Thread, timeout: float | None = None) -> None:
    """Wait for the end of a thread, at most `timeout` seconds; None: no limit."""
    for seconds in _parts(timeout):
        thread.join(seconds)
        if not thread.is_alive():
            return


def wait_for(event: threading.Event) -> None:
    """Wait until an event is set."""
    while not event.wait(_INTERRUPT_SECONDS):
        continue


def wait_until(condition: threading.Condition, predicate: Callable[[], object]) -> None:
    """Wait until a predicate is true; see `Condition.wait_for`."""
    while not condition.wait_for(predicate, _INTERRUPT_SECONDS):
        continue


def next_item(items: _Queue[_Item], timeout: float) -> _Item:
    """Remove and return the next item of a queue.

    Raises:
        queue.Empty: There was no item within `timeout` seconds.
    """
    for seconds in _parts(timeout):
        try:
            return items.get(timeout=seconds)
        except queue.Empty:
            continue
    raise queue.Empty


def run_until_done(loop: asyncio.AbstractEventLoop, end: asyncio.Future[Any]) -> None:
    """Run a loop until a future, which raises no error, is done or cancelled.

    KeyboardInterrupt and SystemExit end only the task that raises them. asyncio stores them in the task and also stops
    the loop, although other tasks are running.
    """
    while True:
        try:
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(end)
        except (KeyboardInterrupt, SystemExit):
            continue
        return


def run_in(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine in the loop of another thread and return its result; an interrupt cancels the coroutine."""
    # The future exists before the task, so that an interrupt at any point cancels the task.
    future: Future[_Result] = Future()
    try:
        start_in(loop, coroutine, future)
        return result_of(future)
    finally:
        future.cancel()


def start_in(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, _Result],
    future: Future[_Result],
    *,
    context: Context | None = None,
) -> None:
    """Run a coroutine as a task in the loop of another thread. The task sets the future.

    Cancelling the task or the future cancels the other one.
    """
    loop.call_soon_threadsafe(_start, coroutine, future, loop, context=context)


def _start(coroutine: Coroutine[Any, Any, _Result], future: Future[_Result], loop: asyncio.AbstractEventLoop) -> None:
    if future.cancelled():
        coroutine.close()
        return
    task = loop.create_task(coroutine)

    def finish(task: asyncio.Task[_Result]) -> None:
        if task.cancelled():
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        error = task.exception()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def cancel(future: Future[_Result]) -> None:
        if future.cancelled() and not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    task.add_done_callback(finish)
    future.add_done_callback(cancel)


def _parts(timeout: float | None) -> Iterator[float]:
    """Yield the seconds of each part of a wait. The last part ends `timeout` seconds after the first one has begun."""
    end = None if timeout is None else time.monotonic() + timeout
    while end is None or (left := end - time.monotonic()) > _INTERRUPT_SECONDS:
        yield _INTERRUPT_SECONDS
    yield max(left, 0.0)
