"""Tests of administrators' commands with a running gateway."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.gateway_run import command_line
from fixtures.running_gateway import RunningGateway, running_gateway
from twinkle_client.client import TwinkleClient
from twinkle_client.errors import AccessError, NotFoundError


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway without upstream services."""
    async with running_gateway(tmp_path) as running:
        yield running


@pytest.fixture
async def run(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs a command in a thread and returns its result."""
    return command_line(monkeypatch, gateway.address)


def _secret_of(result: Any) -> str:
    # The gateway runs in this process and may log between the command's lines.
    (secret,) = [line for line in result.stdout.splitlines() if line.startswith('tml-')]
    return secret


async def _begin_session(gateway: RunningGateway, secret: str, *, project_id: str = '') -> str:
    def begin() -> str:
        with TwinkleClient(f'http://{gateway.address}', secret) as client:
            return client.create_session(project_id=project_id).project_id

    return await asyncio.to_thread(begin)


async def test_key_is_created_for_a_project_and_rotated(gateway: RunningGateway, run: Any) -> None:
    """Sessions of a key belong to its project, and a rotated key works until its overlap ends."""
    assert (await run('tenants', 'create', 'lab', '--name', 'The lab')).exit_code == 0
    assert 'The lab' in (await run('tenants', 'list')).output
    assert (await run('projects', 'create', 'lab', 'rl')).exit_code == 0
    assert 'rl' in (await run('projects', 'list', 'lab')).output
    created = await run('keys', 'create', 'lab', '--ttl', '30d', '--project', 'rl')
    secret = _secret_of(created)
    assert await _begin_session(gateway, secret) == 'rl'
    key_id = secret.removeprefix('tml-').rpartition('-')[0]
    first = await run('keys', 'rotate', key_id, '--overlap', '1h')
    successor = _secret_of(first)
    assert await _begin_session(gateway, secret) == await _begin_session(gateway, successor) == 'rl'
    successor_id = successor.removeprefix('tml-').rpartition('-')[0]
    last = _secret_of(await run('keys', 'rotate', successor_id, '--overlap', '0s'))
    with pytest.raises(AccessError):
        await _begin_session(gateway, successor)
    assert await _begin_session(gateway, last) == 'rl'
    listed = (await run('keys', 'list', 'lab')).output
    # Each key id appears in its own line and in its successor's line. No secret is shown.
    assert [listed.count(item) for item in (key_id, successor_id, secret)] == [2, 2, 0]


async def test_empty_lists_print_one_line(run: Any) -> None:
    """An empty list prints one line to stderr, and no table."""
    assert (await run('tenants', 'create', 'lab')).exit_code == 0
    for command, line in {
        ('projects', 'list', 'lab'): 'tenant lab has no projects',
        ('keys', 'list', 'lab'): 'tenant lab has no keys',
        ('usage', 'lab'): 'no usage yet',
        ('checkpoint', 'exports'): 'no exports yet',
    }.items():
        listed = await run(*command)
        assert (listed.exit_code, listed.stderr.strip()) == (0, line), command
        # The gateway in this process may log to stdout, so the test only checks that there is no table.
        assert '━' not in listed.stdout


async def test_unknown_projects_keys_tenants_and_times_are_refused(gateway: RunningGateway, run: Any) -> None:
    """Invalid values are refused, and the error for an unknown project names the command that creates a project."""
    await run('tenants', 'create', 'lab')
    unknown = await run('keys', 'create', 'lab', '--project', 'nowhere')
    assert (unknown.exit_code, 'twinkle projects create' in unknown.output) == (1, True)
    assert (await run('keys', 'create', 'lab', '--ttl', 'soon')).exit_code == 2
    assert (await run('keys', 'rotate', 'key-9')).exit_code == 1
    assert (await run('projects', 'list', 'nobody')).exit_code == 1
    secret = _secret_of(await run('keys', 'create', 'lab'))
    with pytest.raises(NotFoundError, match='nowhere'):
        await _begin_session(gateway, secret, project_id='nowhere')


async def test_commands_of_administrators_print_json(run: Any) -> None:
    """Lists, new keys and quotas are printed as JSON with `--json`, with the names of the contract."""

    async def result_of(*arguments: str) -> Any:
        # The gateway runs in this process and may log between the command's lines.
        output = (await run(*arguments, '--json')).stdout
        (line,) = [line for line in output.splitlines() if line.startswith(('[', '{'))]
        return json.loads(line)

    await run('tenants', 'create', 'lab', '--name', 'The lab')
    await run('projects', 'create', 'lab', 'rl')
    names = {item['tenant_id']: item['display_name'] for item in await result_of('tenants', 'list')}
    assert names['lab'] == 'The lab'
    assert [item['project_id'] for item in await result_of('projects', 'list', 'lab')] == ['rl']
    created = await result_of('keys', 'create', 'lab', '--scopes', 'train,sample', '--name', 'first')
    assert created['secret'].startswith(f'tml-{created["key_id"]}-')
    assert (created['scopes'], created['state'], created['tenant_id']) == (['train', 'sample'], 'good', 'lab')
    rotated = await result_of('keys', 'rotate', created['key_id'], '--overlap', '0s')
    states = {item['key_id']: item['state'] for item in await result_of('keys', 'list', 'lab')}
    assert states == {created['key_id']: 'replaced', rotated['key_id']: 'good'}
    changed = await result_of('quota', 'set', 'lab', 'max_adapters=4')
    assert changed['quota'] == {'max_adapters': 4}
    assert await result_of('checkpoint', 'exports') == []
