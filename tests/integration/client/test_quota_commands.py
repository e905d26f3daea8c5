"""`twinkle quota` and `twinkle usage` against a gateway."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.fake_samplers import FakeSampler
from fixtures.fleet import RunningFleet, running_fleet
from fixtures.gateway_run import command_line
from fixtures.running_gateway import ADMIN
from fixtures.sampled_answers import sample_request


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[RunningFleet]:
    """A gateway with one sampler."""
    async with running_fleet(tmp_path, FakeSampler()) as running:
        yield running


@pytest.fixture
def run(fleet: RunningFleet, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs a command as an administrator."""
    return command_line(monkeypatch, fleet.gateway.address)


def json_of(result: Any) -> Any:
    """Return the JSON that a command printed, without log lines of the gateway in this process."""
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith(('{', '[')))
    end = max(index for index, line in enumerate(lines) if line.startswith(('}', ']')) or line.endswith(('}', ']')))
    return json.loads('\n'.join(line for line in lines[begin : end + 1] if not line.startswith('20')))


async def test_quota_set_changes_only_the_named_limits(run: Any) -> None:
    """Limits that are not named are kept; the value `default` resets a limit."""
    await run('quota', 'set', 'default', 'max_adapters=3', 'weight=2.5')
    changed = await run('quota', 'set', 'default', 'stored_bytes=1000', 'max_adapters=default')
    assert changed.exit_code == 0, changed.output
    assert '1,000' in changed.output
    shown = json_of(await run('quota', 'show', 'default', '--json'))
    assert shown['quota'] == {'stored_bytes': 1000, 'weight': 2.5}
    assert shown['effective_quota'] == shown['quota']


async def test_invalid_limits_and_tenants_are_refused(run: Any) -> None:
    """Unknown limits, values that are not numbers or are out of range, and unknown tenants are refused."""
    assert (await run('quota', 'set', 'default', 'adapters=1')).exit_code == 2
    assert (await run('quota', 'set', 'default', 'max_adapters=many')).exit_code == 2
    assert (await run('quota', 'set', 'default', 'weight=0')).exit_code == 1
    assert (await run('quota', 'show', 'nobody')).exit_code == 1
    assert (await run('usage', 'nobody')).exit_code == 1
    assert (await run('usage', '--since', 'long')).exit_code == 2


async def test_usage_is_shown_by_run(run: Any, fleet: RunningFleet) -> None:
    """An administrator sees the usage of the key's tenant or of a named tenant, with a line for the total."""
    async for _ in fleet.stub.Sample(sample_request((1, 2, 3), max_tokens=8), metadata=ADMIN):
        pass
    expected = {
        'run_id': '',
        'operation_count': 0,
        'trained_token_count': 0,
        'prompt_count': 1,
        'prompt_token_count': 3,
        'sampled_token_count': 8,
        'stored_bytes': 0,
        'metric_point_count': 0,
    }
    assert json_of(await run('usage', '--json')) == json_of(await run('usage', 'default', '--json')) == [expected]
    table = (await run('usage')).output
    assert '(base model)' in table
    assert 'all' in table
