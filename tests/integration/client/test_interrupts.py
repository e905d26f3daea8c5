"""Ctrl-C on the command line: one line, status 130, and the server hears of it."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from fixtures.fake_gateway import API_KEY, FakeGateway


async def test_an_answer_that_is_interrupted_ends_on_the_server_too(gateway: FakeGateway, tmp_path: Path) -> None:
    """What came is kept; no traceback is shown."""
    environment = {
        **os.environ,
        'TWINKLE_SERVER_URL': f'http://127.0.0.1:{gateway.port}',
        'TWINKLE_API_KEY': API_KEY,
        'TWINKLE_STATE_DIR': str(tmp_path),
    }
    words = [sys.executable, '-m', 'twinkle_client.cli', 'sample', 'hi', '--model', 'tiny']
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        assert process.stdout is not None
        shown = await asyncio.wait_for(process.stdout.readuntil(b'two '), 60)
        process.send_signal(signal.SIGINT)
        rest, said = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert shown + rest == b'one two '
    assert process.returncode == 128 + signal.SIGINT
    assert said.count(b'twinkle: interrupted') == 1
    assert b'Traceback' not in said
    assert len(gateway.calls['SampleCancelled']) == 1
