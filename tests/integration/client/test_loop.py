"""The shared loop thread: `os.fork`, interpreter exit, and clients that close while others make calls."""

import asyncio
import subprocess
import sys

from fixtures.fake_gateway import API_KEY, FakeGateway
from twinkle_client import TwinkleClient

_FORK = """
import os
import signal
import threading
from twinkle_client.rpc.loop import LoopThread

async def answer():
    return 42

inherited = LoopThread()
inherited.run(answer())
is_held, is_forked = threading.Event(), threading.Event()

def hold():
    with inherited._lock:  # as during a call
        is_held.set()
        is_forked.wait()

holder = threading.Thread(target=hold)
holder.start()
is_held.wait()
child = os.fork()
if child:
    is_forked.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0
    assert inherited.run(answer()) == 42
else:
    signal.alarm(20)  # ends a child that waits for the lock
    try:
        inherited.run(answer())
    except RuntimeError:
        inherited.stop()
    else:
        raise SystemExit('a client survived the fork')
    assert LoopThread().run(answer()) == 42
"""
_EXIT = """
import asyncio
from twinkle_client.rpc.loop import LoopThread

async def wait(started):
    try:
        started.set()
        await asyncio.Event().wait()
    finally:
        print('cancelled', flush=True)

async def start():
    started = asyncio.Event()
    tasks.append(asyncio.create_task(wait(started)))
    await started.wait()

tasks = []
LoopThread().run(start())
"""


def _run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, '-X', 'dev', '-W', 'error', '-c', program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_forked_child_starts_a_new_loop() -> None:
    """A loop that starts before a fork works only in the parent; the child can start its own loop without warnings."""
    done = _run(_FORK)
    assert (done.returncode, done.stderr) == (0, '')


def test_interpreter_exit_cancels_running_tasks() -> None:
    """A program that never stops its loop exits without warnings after its tasks were cancelled."""
    done = _run(_EXIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, 'cancelled\n', '')


async def test_clients_that_close_do_not_disturb_the_calls_of_others(gateway: FakeGateway) -> None:
    """Calls of one client succeed while other clients open and close in the same process."""
    address = f'http://127.0.0.1:{gateway.port}'

    def open_and_close() -> None:
        for _ in range(20):
            with TwinkleClient(address, API_KEY) as other:
                other.get_server_info()

    def call() -> None:
        with TwinkleClient(address, API_KEY) as client:
            for _ in range(100):
                client.get_server_info()

    await asyncio.gather(*(asyncio.to_thread(work) for work in (open_and_close, open_and_close, call)))
