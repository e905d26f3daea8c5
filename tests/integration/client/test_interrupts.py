"""Ctrl-C on the command line prints one line to stderr, exits with status 130, and cancels the call on the server."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from fixtures.fake_gateway import API_KEY, FakeGateway

EXITING = """
import asyncio, sys, threading
from twinkle_client.rpc import LoopThread

started = threading.Event()

async def end_slowly():
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        print('ending', flush=True)
        await asyncio.Event().wait()

LoopThread().submit(end_slowly())
started.wait()
sys.exit(3)
"""
"""Program whose exit waits for a task that does not end."""
RAISING = """
import sys
from twinkle_client.rpc import LoopThread

generators = []

async def interrupted():
    try:
        yield
    finally:
        raise KeyboardInterrupt

async def begin():
    generators.append(interrupted())
    await anext(generators[0])

LoopThread().run(begin())
sys.exit(3)
"""
"""Program with a generator that raises KeyboardInterrupt when the loop closes it."""


async def test_interrupted_sample_is_cancelled_on_the_server(gateway: FakeGateway, tmp_path: Path) -> None:
    """Ctrl-C during a sample keeps the received text, shows no traceback, and cancels the call on the server."""
    environment = {
        **os.environ,
        'TWINKLE_SERVER_URL': f'http://127.0.0.1:{gateway.port}',
        'TWINKLE_API_KEY': API_KEY,
        'TWINKLE_STATE_DIR': str(tmp_path),
    }
    command = [sys.executable, '-m', 'twinkle_client.cli', 'sample', 'hi', '--model', 'tiny']
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        assert process.stdout is not None
        shown = await asyncio.wait_for(process.stdout.readuntil(b'two '), 60)
        process.send_signal(signal.SIGINT)
        rest, errors = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert shown + rest == b'one two '
    assert process.returncode == 128 + signal.SIGINT
    assert errors.count(b'twinkle: interrupted') == 1
    assert b'Traceback' not in errors
    assert len(gateway.calls['SampleCancelled']) == 1


async def run(program: str, *, interrupted_after: bytes = b'') -> tuple[int | None, bytes]:
    """Run a program, interrupt it after a line of its output, and return its exit status and its errors."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, '-c', program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        if interrupted_after:
            assert process.stdout is not None
            await asyncio.wait_for(process.stdout.readuntil(interrupted_after), 60)
            process.send_signal(signal.SIGINT)
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, errors


@pytest.mark.parametrize(('program', 'line'), [(EXITING, b'ending'), (RAISING, b'')])
async def test_interrupt_while_the_loop_of_clients_ends_shows_no_traceback(program: str, line: bytes) -> None:
    """Ctrl-C ends the wait for tasks at the exit of a program without a traceback, and keeps the exit status."""
    assert await run(program, interrupted_after=line) == (3, b'')
