"""The shared loop thread: clients share one thread, and stopping one client leaves the others running."""

import asyncio
import signal
import threading
from concurrent.futures import CancelledError
from contextvars import ContextVar

import pytest

from twinkle_client.rpc import LoopThread

_marker: ContextVar[str] = ContextVar('marker', default='')


async def _thread() -> threading.Thread:
    return threading.current_thread()


async def _wait_forever(started: threading.Event, finished: threading.Event) -> None:
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        finished.set()


def test_clients_share_one_thread() -> None:
    """The coroutines of two clients run on the same thread."""
    first, second = LoopThread(), LoopThread()
    assert first.run(_thread()) is second.run(_thread())


def test_stopping_one_client_leaves_the_tasks_of_another_running() -> None:
    """Stopping a client waits until its tasks are cancelled, and does not affect other clients' tasks."""
    first, second = LoopThread(), LoopThread()
    started, finished, other_started, other_finished = (threading.Event() for _ in range(4))
    running, other = (
        first.submit(_wait_forever(started, finished)),
        second.submit(_wait_forever(other_started, other_finished)),
    )
    assert started.wait(10)
    assert other_started.wait(10)
    first.stop()
    assert finished.is_set()
    assert running.cancelled()
    assert not other.done()
    assert second.run(_thread()).is_alive()
    second.stop()
    assert other_finished.is_set()


def test_stopping_cancels_tasks_that_coroutines_created() -> None:
    """A background task counts as a task of the client whose coroutine created it."""
    client, started, finished = LoopThread(), threading.Event(), threading.Event()
    background: list[asyncio.Task[None]] = []

    async def create() -> None:
        background.append(asyncio.create_task(_wait_forever(started, finished)))

    client.run(create())
    assert started.wait(10)
    client.stop()
    assert background[0].cancelled()


def test_a_stopped_client_refuses_coroutines() -> None:
    """A stopped client raises RuntimeError on a submission; stopping it again has no effect."""
    client = LoopThread()
    client.stop()
    client.stop()
    with pytest.raises(RuntimeError, match='the client is closed'):
        client.submit(_thread())
    with pytest.raises(RuntimeError, match='the client is closed'):
        client.run(_thread())


def test_coroutines_start_in_the_order_of_submission() -> None:
    """Coroutines of one client start in the order in which they were submitted."""
    client, order = LoopThread(), list[int]()

    async def note(number: int) -> None:
        order.append(number)

    futures = [client.submit(note(number)) for number in range(100)]
    for future in futures:
        future.result(10)
    assert order == list(range(100))


def test_coroutines_see_the_context_of_the_submitter() -> None:
    """A coroutine runs with the context variables that were set when it was submitted."""

    async def read() -> str:
        return _marker.get()

    client = LoopThread()
    token = _marker.set('here')
    try:
        future = client.submit(read())
    finally:
        _marker.reset(token)
    assert future.result(10) == 'here'


def test_cancelling_the_future_cancels_the_coroutine() -> None:
    """Cancelling the future of a submitted coroutine cancels the coroutine."""
    client, started, finished = LoopThread(), threading.Event(), threading.Event()
    future = client.submit(_wait_forever(started, finished))
    assert started.wait(10)
    future.cancel()
    assert finished.wait(10)
    with pytest.raises(CancelledError):
        future.result(10)


def test_a_blocking_call_on_the_loop_thread_is_refused() -> None:
    """A coroutine that blocks on another client, or stops another client, raises RuntimeError."""
    first, second = LoopThread(), LoopThread()

    async def block() -> None:
        with pytest.raises(RuntimeError):
            second.run(_thread())
        with pytest.raises(RuntimeError):
            second.stop()

    first.run(block())


def test_only_the_running_client_is_current() -> None:
    """A client is current inside its own coroutines, and not inside another client's coroutines."""
    first, second = LoopThread(), LoopThread()

    async def current() -> tuple[bool, bool]:
        return first.is_current, second.is_current

    assert first.run(current()) == (True, False)
    assert not first.is_current


def test_an_interrupt_that_another_thread_receives_ends_a_blocking_call() -> None:
    """Ctrl-C cancels a blocking call even if the operating system delivers the signal to another thread."""
    client, started, finished = LoopThread(), threading.Event(), threading.Event()

    async def interrupt_and_wait() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        await _wait_forever(started, finished)

    with pytest.raises(KeyboardInterrupt):
        client.run(interrupt_and_wait())
    assert started.is_set()
    assert finished.wait(10)
    client.stop()


def test_a_timeout_of_the_coroutine_is_raised() -> None:
    """A TimeoutError that a coroutine raises ends the call."""

    async def fail() -> None:
        raise TimeoutError('of the coroutine')

    with pytest.raises(TimeoutError, match='of the coroutine'):
        LoopThread().run(fail())


@pytest.mark.parametrize('kind', [KeyboardInterrupt, SystemExit])
def test_an_error_that_ends_programs_ends_only_its_call(kind: type[BaseException]) -> None:
    """A coroutine or one of its tasks may raise KeyboardInterrupt or SystemExit; calls of other clients continue."""
    first, second, started, finished = LoopThread(), LoopThread(), threading.Event(), threading.Event()
    other = second.submit(_wait_forever(started, finished))
    assert started.wait(10)

    async def fail() -> None:
        raise kind

    async def fail_in_a_task() -> None:
        await asyncio.gather(fail())

    for call in (fail, fail_in_a_task):
        with pytest.raises(kind):
            first.run(call())
    assert not other.done()
    assert first.run(_thread()) is second.run(_thread())
    second.stop()
    assert finished.is_set()
