"""The command line of the Tinker SDK, unmodified, against the gateway and a real checkpoint service."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.tinker_catalogue import RUN, TinkerCatalogue, tinker_catalogue

PATH = f'tinker://{RUN}/weights/best'


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[TinkerCatalogue]:
    """Serve the API; Alice's run has a checkpoint, and the catalogue knows it."""
    async with tinker_catalogue(tmp_path) as running:
        await running.save('best')
        await running.until_listed(1)
        yield running


async def _tinker(api: TinkerCatalogue, home: Path, *words: str, key: str = 'alice') -> tuple[int, str]:
    """Return exit status and output of a command."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name('tinker')),
        '-f',
        'json',
        *words,
        env={
            'PATH': os.environ['PATH'],
            'HOME': str(home),
            'TINKER_API_KEY': api.keys[key],
            'TINKER_BASE_URL': f'http://{api.gateway.http_address}',
            'TINKER_TELEMETRY': '0',
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, complaints = await process.communicate()
    assert process.returncode is not None
    # A thread of the SDK that holds a stream at interpreter shutdown makes Python abort after all output was written,
    # with a message about the shutdown or with none.
    is_complete = process.returncode == -signal.SIGABRT and (not complaints or b'at interpreter shutdown' in complaints)
    assert is_complete or process.returncode >= 0, complaints.decode()
    return 0 if is_complete else process.returncode, output.decode()


async def _told(api: TinkerCatalogue, home: Path, *words: str, **fields: Any) -> Any:
    status, output = await _tinker(api, home, *words, **fields)
    assert status == 0, output
    return json.loads(output) if output.strip() else None


async def test_command_line_publishes_and_gives_an_end(api: TinkerCatalogue, tmp_path: Path) -> None:
    """What publish and set-ttl did is in the list."""
    await _told(api, tmp_path, 'checkpoint', 'publish', PATH)
    await _told(api, tmp_path, 'checkpoint', 'set-ttl', PATH, '--ttl', '3600')
    (changed,) = (await _told(api, tmp_path, 'checkpoint', 'list'))['checkpoints']
    assert changed['tinker_path'] == PATH
    assert changed['public']
    assert changed['expires_at']


async def test_command_line_deletes_what_is_the_tenants_alone(api: TinkerCatalogue, tmp_path: Path) -> None:
    """Another tenant's key lists no run and deletes nothing; the owner's does."""
    assert (await _told(api, tmp_path, 'run', 'list', key='bob'))['runs'] == []
    # The command tells of what it could not delete, and its status is that of one that did.
    await _tinker(api, tmp_path, 'checkpoint', 'delete', '--yes', PATH, key='bob')
    await api.until_listed(1)
    assert (await _tinker(api, tmp_path, 'checkpoint', 'delete', '--yes', PATH))[0] == 0
    await api.until_listed(0)
