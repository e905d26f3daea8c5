"""Ctrl-C on the command line: one line on stderr, status 130, and cancellation on the server."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from fixtures.fake_gateway import API_KEY, FakeGateway


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
