"""Tests of the Tinker SDK's unmodified command line, with a gateway and a real checkpoint service."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.tinker_catalogue import RUN, TinkerCatalogue, tinker_catalogue
from fixtures.tinker_sdk import program_status

PATH = f'tinker://{RUN}/weights/best'


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[TinkerCatalogue]:
    """The API, with a checkpoint of alice's run in the catalogue."""
    async with tinker_catalogue(tmp_path) as running:
        await running.save('best')
        await running.until_listed(1)
        yield running


async def _run_tinker(api: TinkerCatalogue, home: Path, *arguments: str, key: str = 'alice') -> tuple[int, str]:
    """Run a command and return its exit status and output."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name('tinker')),
        '-f',
        'json',
        *arguments,
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
    output, errors = await process.communicate()
    assert process.returncode is not None
    status = program_status(process.returncode, errors.decode())
    assert status >= 0, errors.decode()
    return status, output.decode()


async def _json_of(api: TinkerCatalogue, home: Path, *arguments: str, **fields: Any) -> Any:
    status, output = await _run_tinker(api, home, *arguments, **fields)
    assert status == 0, output
    return json.loads(output) if output.strip() else None


@pytest.mark.slow
async def test_command_line_publishes_and_sets_a_time_to_live(api: TinkerCatalogue, tmp_path: Path) -> None:
    """The list of checkpoints shows the effects of publish and set-ttl."""
    await _json_of(api, tmp_path, 'checkpoint', 'publish', PATH)
    await _json_of(api, tmp_path, 'checkpoint', 'set-ttl', PATH, '--ttl', '3600')
    (changed,) = (await _json_of(api, tmp_path, 'checkpoint', 'list'))['checkpoints']
    assert changed['tinker_path'] == PATH
    assert changed['public']
    assert changed['expires_at']


@pytest.mark.slow
async def test_command_line_deletes_only_checkpoints_of_the_tenant(api: TinkerCatalogue, tmp_path: Path) -> None:
    """A tenant can delete its checkpoint; another tenant cannot list the run or delete the checkpoint."""
    assert (await _json_of(api, tmp_path, 'run', 'list', key='bob'))['runs'] == []
    # The command reports the checkpoint that it could not delete, and still exits with success.
    await _run_tinker(api, tmp_path, 'checkpoint', 'delete', '--yes', PATH, key='bob')
    await api.until_listed(1)
    assert (await _run_tinker(api, tmp_path, 'checkpoint', 'delete', '--yes', PATH))[0] == 0
    await api.until_listed(0)
