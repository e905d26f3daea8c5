"""Waits that a signal ends, even if another thread receives it."""

import asyncio
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from twinkle.blocking import join, next_item, result_of, results_of, run_until_done, wait_for, wait_for_all, wait_until
from twinkle.sampler.loop_thread import LoopThread

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def endless() -> Iterator[threading.Thread]:
    """A thread that runs until the end of the test."""
    is_done = threading.Event()
    thread = threading.Thread(target=is_done.wait)
    thread.start()
    yield thread
    is_done.set()
    thread.join()


def _wait_until_false(_: threading.Thread) -> None:
    condition = threading.Condition()
    with condition:
        wait_until(condition, lambda: False)


WAITS: dict[str, Callable[[threading.Thread], object]] = {
    'join': join,
    'next_item': lambda _: next_item(queue.SimpleQueue[Any](), 3600),
    'result_of': lambda _: result_of(Future[Any]()),
    'results_of': lambda _: results_of([Future[Any]()]),
    'wait_for': lambda _: wait_for(threading.Event()),
    'wait_for_all': lambda _: wait_for_all([Future[Any]()]),
    'wait_until': _wait_until_false,
}


@pytest.mark.parametrize('name', WAITS)
def test_signal_of_another_thread_ends_a_wait(name: str, endless: threading.Thread) -> None:
    """Each wait raises KeyboardInterrupt if the operating system delivers Ctrl-C to another thread."""

    def interrupt() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def wait() -> None:
        threading.Thread(target=interrupt).start()
        WAITS[name](endless)

    with pytest.raises(KeyboardInterrupt):
        wait()


def test_waits_return_what_they_wait_for() -> None:
    """Each wait ends when its event happens, and a wait with a timeout reports that nothing happened."""
    done, open_future, items = Future[int](), Future[int](), queue.SimpleQueue[int]()
    done.set_result(3)
    items.put(4)
    assert (result_of(done), results_of([done, done]), next_item(items, 0)) == (3, [3, 3], 4)
    assert wait_for_all([done], 0)
    assert not wait_for_all([done, open_future], 0.01)
    with pytest.raises(queue.Empty):
        next_item(items, 0.01)


def test_error_of_a_future_is_raised() -> None:
    """The error of a future is raised, also a TimeoutError, and work that has not started is cancelled."""
    failed = Future[int]()
    failed.set_exception(TimeoutError('of the work'))
    with pytest.raises(TimeoutError, match='of the work'):
        result_of(failed)
    is_done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(is_done.wait)
        waiting = pool.submit(int)
        with pytest.raises(TimeoutError, match='of the work'):
            results_of([failed, waiting])
        is_done.set()
    assert waiting.cancelled()


def test_interrupt_cancels_a_coroutine_of_a_loop_thread() -> None:
    """A coroutine that runs for the interrupted thread is cancelled, even if another thread receives the signal."""
    thread, cancelled = LoopThread('test'), threading.Event()

    async def wait() -> None:
        try:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(KeyboardInterrupt):
        thread.run(wait())
    assert cancelled.wait(10)
    thread.close()


@pytest.mark.parametrize('kind', [KeyboardInterrupt, SystemExit])
def test_error_that_ends_programs_ends_only_its_call(kind: type[BaseException]) -> None:
    """The caller receives KeyboardInterrupt or SystemExit of its coroutine, and the loop runs until it is closed."""
    thread = LoopThread('test')

    async def fail() -> None:
        raise kind

    with pytest.raises(kind):
        thread.run(fail())
    assert thread.run(asyncio.sleep(0, 'result')) == 'result'
    thread.close()


def test_error_of_a_task_does_not_keep_a_loop_running() -> None:
    """A loop ends with its future even if a task raises SystemExit in the same step."""
    loop = asyncio.new_event_loop()
    end, later = loop.create_future(), loop.create_future()

    async def fail() -> None:
        raise SystemExit

    loop.call_soon(end.cancel)
    task = loop.create_task(fail())
    loop.call_soon(loop.call_soon, later.cancel)
    run_until_done(loop, end)
    run_until_done(loop, later)
    assert isinstance(task.exception(), SystemExit)
    loop.close()
