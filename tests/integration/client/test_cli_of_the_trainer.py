"""Commands about training, against a gateway."""

import asyncio

import pytest
from typer.testing import CliRunner

from fixtures.fake_gateway import API_KEY, FakeGateway
from fixtures.fake_wire import RUN_ID
from twinkle.api.model.v1 import training_service_pb2 as wire
from twinkle_client.cli import app


@pytest.fixture
async def run(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch):
    """Run a command beside the gateway's loop and return what came of it."""
    monkeypatch.setenv('TWINKLE_SERVER_URL', f'http://127.0.0.1:{gateway.port}')
    monkeypatch.setenv('TWINKLE_API_KEY', API_KEY)
    monkeypatch.setenv('COLUMNS', '200')
    return lambda *arguments: asyncio.to_thread(CliRunner().invoke, app, list(arguments))


async def test_estimate_tells_what_fits(gateway: FakeGateway, run) -> None:
    """The figures are printed; what does not fit is status 1."""
    fitting = await run('estimate', 'tiny', '--rank', '4', '--batch', '2', '--tokens', '100')
    assert (fitting.exit_code, '1.50 s' in fitting.output) == (0, True)
    assert gateway.calls['Estimate'][0].lora_config.lora_rank == 4
    assert (await run('estimate', 'tiny', '--batch', '100', '--tokens', '100')).exit_code == 1


async def test_full_estimate_asks_for_no_adapter(gateway: FakeGateway, run) -> None:
    """`--full` asks for the base model's own weights."""
    assert (await run('estimate', 'tiny', '--full', '--batch', '1', '--tokens', '1')).exit_code == 0
    assert gateway.calls['Estimate'][0].HasField('full_parameters')


@pytest.mark.parametrize(
    ('record', 'state'),
    [
        (None, 'idle'),
        (wire.GetOperationResponse(state=wire.OPERATION_STATE_RUNNING), 'running'),
        (wire.GetOperationResponse(state=wire.OPERATION_STATE_QUEUED, queue_position=2), '3rd in line'),
    ],
)
async def test_runs_tell_where_they_are(gateway: FakeGateway, run, record, state: str) -> None:
    """The state is that of the next operation."""
    if record is not None:
        gateway.memory.queue.append(record)
    result = await run('runs')
    (line,) = [line for line in result.output.splitlines() if f'{RUN_ID} ' in line]
    assert state in line
