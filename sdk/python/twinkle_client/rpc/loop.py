"""The event loop that runs the calls of all clients, in one background thread per process.

grpc.aio has one completion queue per process and delivers its events through any loop that is registered with
the queue. If one loop closes, calls on the other loops fail with "Event loop is closed". Therefore all clients share a
loop that stays open until the interpreter exits.
"""

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from twinkle.blocking import join, result_of, run_until_done, start_in

_Result = TypeVar('_Result')

_EXIT_TIMEOUT_SECONDS = 5.0
"""Longest wait for the tasks that are still running at interpreter exit."""


class LoopThread:
    """One client's access to the loop thread of the process.

    Coroutines start in the order in which they are submitted, and run with the submitter's context variables. Stopping
    cancels the tasks of this client only. After `os.fork`, the child process cannot use the client.
    """

    def __init__(self) -> None:
        self._shared = _shared_loop()
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        """Tasks that `stop` cancels."""
        # Reentrant, because the garbage collector may close an abandoned stream at any point.
        self._lock = threading.RLock()
        self._end: Future[None] | None = None

    @property
    def is_current(self) -> bool:
        """Whether the caller is a coroutine of this client."""
        return self._shared.is_current and _owner.get() is self

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Start `coroutine` and return a future; cancelling the future cancels the coroutine.

        Raises:
            RuntimeError: The client has been stopped, or this process was forked after the client was created.
        """
        future: Future[_Result] = Future()
        self._submit(coroutine, future)
        return future

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run `coroutine` and return its result; an interrupt of the waiting thread cancels the coroutine.

        Raises:
            RuntimeError: The caller is on the loop thread, which would wait for itself, or the client has been
                stopped.
        """
        if self._shared.is_current:
            coroutine.close()
            raise RuntimeError('a blocking call inside a coroutine of a client; use its .aio form')
        # The future exists before the task, so that an interrupt at any point cancels the task.
        future: Future[_Result] = Future()
        try:
            self._submit(coroutine, future)
            return result_of(future)
        finally:
            future.cancel()

    def stop(self) -> None:
        """Cancel the client's tasks and wait until they have finished; stopping again does nothing.

        Raises:
            RuntimeError: The caller is on the loop thread, which would wait for itself.
        """
        if self._shared.is_current:
            raise RuntimeError('a client cannot be stopped inside a coroutine of a client; stop it from another thread')
        if not self._shared.is_open:
            return
        with self._lock:
            if self._end is None and self._shared.is_open:
                self._end = asyncio.run_coroutine_threadsafe(self._cancel_tasks(), self._shared.loop)
        if self._end is not None and self._shared.is_open:
            result_of(self._end)

    def _submit(self, coroutine: Coroutine[Any, Any, _Result], future: Future[_Result]) -> None:
        context = copy_context()
        context.run(_owner.set, self)
        # In a forked child, a thread of the parent process may hold the lock forever.
        if self._shared.is_open:
            with self._lock:
                if self._end is None and self._shared.is_open:
                    start_in(self._shared.loop, coroutine, future, context=context)
                    return
        coroutine.close()
        raise RuntimeError('the client is closed, or belongs to a parent process; create a client')

    async def _cancel_tasks(self) -> None:
        # A cancelled task may start another task to clean up.
        while tasks := set(self.tasks) - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.tasks.difference_update(tasks)


_owner: ContextVar[LoopThread | None] = ContextVar('twinkle_client_loop_owner', default=None)
"""Client whose coroutine is running; a task inherits the client from the task that creates it."""


class _SharedLoop:
    """The loop and its thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(_create_task)
        self._end: asyncio.Future[None] = self.loop.create_future()
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._run, name='twinkle-client', daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether coroutines can be submitted; False after `close`, and in a forked child, which has no loop thread."""
        return not self.loop.is_closed() and self._process_id == os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether the caller is on the loop thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Cancel all tasks and end the thread. An interrupt ends the wait, and leaves the thread running."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._end.cancel)
        join(self._thread, _EXIT_TIMEOUT_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            run_until_done(self.loop, self._end)
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            run_until_done(self.loop, asyncio.gather(*tasks, return_exceptions=True))
            run_until_done(self.loop, self.loop.create_task(self.loop.shutdown_asyncgens()))
            self.loop.close()


def _create_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, *, context: Context | None = None, **options: Any
) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, context=context, **options)
    owner = _owner.get() if context is None else context.get(_owner)
    if owner is not None:
        owner.tasks.add(task)
    return task


_shared: list[_SharedLoop] = []
"""The open loop of this process, once a client exists. A loop inherited by a fork is kept but not used."""
_shared_lock = threading.Lock()


def _shared_loop() -> _SharedLoop:
    with _shared_lock:
        if not _shared or not _shared[-1].is_open:
            _shared.append(_SharedLoop())
        return _shared[-1]


os.register_at_fork(
    before=_shared_lock.acquire, after_in_parent=_shared_lock.release, after_in_child=_shared_lock.release
)


@atexit.register
def _close_at_exit() -> None:
    # The program has ended, so an interrupt only ends the wait for its tasks. Its exit status is unchanged.
    with suppress(KeyboardInterrupt):
        if _shared and _shared[-1].is_open:
            _shared[-1].close()
