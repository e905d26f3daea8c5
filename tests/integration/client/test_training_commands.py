"""Tests of the commands `estimate`, `sample` and `runs`, with a fake gateway."""

import json

import pytest

from fixtures.fake_gateway import API_KEY, FakeGateway
from fixtures.fake_wire import RUN_ID
from fixtures.gateway_run import command_line
from twinkle.api.model.v1 import training_service_pb2 as wire


@pytest.fixture
async def run(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch):
    """A function that runs a command in a thread and returns its result."""
    return command_line(monkeypatch, f'127.0.0.1:{gateway.port}', API_KEY)


async def test_estimate_shows_whether_the_batch_fits(gateway: FakeGateway, run) -> None:
    """The estimate is printed, and the status is 1 if the batch does not fit into memory."""
    fitting = await run('estimate', 'tiny', '--rank', '4', '--batch', '2', '--tokens', '100')
    assert (fitting.exit_code, '1.50 s' in fitting.output) == (0, True)
    assert gateway.calls['Estimate'][0].lora_config.lora_rank == 4
    assert (await run('estimate', 'tiny', '--batch', '100', '--tokens', '100')).exit_code == 1


async def test_estimate_of_a_busy_machine_says_so(run) -> None:
    """An estimate that was measured under load has a note, which does not disturb the JSON on the standard output."""
    table = await run('estimate', 'tiny', '--batch', '1', '--tokens', '1')
    assert 'the machine was busy' in table.stderr
    printed = await run('estimate', 'tiny', '--batch', '1', '--tokens', '1', '--json')
    assert json.loads(printed.stdout)['is_measured_under_load'] is True


async def test_full_estimate_is_for_the_weights_of_the_base_model(gateway: FakeGateway, run) -> None:
    """`--full` requests an estimate for training the base model's own weights."""
    assert (await run('estimate', 'tiny', '--full', '--batch', '1', '--tokens', '1')).exit_code == 0
    assert gateway.calls['Estimate'][0].HasField('full_parameters')


@pytest.mark.parametrize(
    ('adapter', 'shown'),
    [
        ('', 'base model'),
        (RUN_ID, 'version 3'),
        ('twinkle://ad-1/weights/final', 'twinkle://ad-1/weights/final'),
    ],
)
async def test_sample_shows_the_weights_that_were_used(run, adapter: str, shown: str) -> None:
    """The output of `twinkle sample` ends with the base model, an adapter's version, or a path without a version."""
    result = await run('sample', 'hello', '--model', 'tiny', '--adapter', adapter, '--max-tokens', '2')
    *_, last = result.output.splitlines()
    assert (result.exit_code, 'tokens' in last, shown in last) == (0, True, True), result.output
    assert ('version' in last) == (adapter == RUN_ID)


async def test_empty_prompt_is_refused_before_it_is_sent(gateway: FakeGateway, run) -> None:
    """An empty prompt is refused with a message, and no request is sent."""
    result = await run('sample', '')
    assert (result.exit_code, 'the prompt is empty' in result.output) == (1, True)
    assert not gateway.calls['Sample']


@pytest.mark.parametrize(
    ('record', 'state'),
    [
        (None, 'idle'),
        (wire.GetOperationResponse(state=wire.OPERATION_STATE_RUNNING), 'running'),
        (wire.GetOperationResponse(state=wire.OPERATION_STATE_QUEUED, queue_position=2), 'queued, 3rd in'),
    ],
)
async def test_runs_show_the_state_of_their_next_operation(gateway: FakeGateway, run, record, state: str) -> None:
    """The list shows whether a run is idle, or its next operation is queued or running."""
    if record is not None:
        gateway.memory.queue.append(record)
    result = await run('runs')
    (line,) = [line for line in result.output.splitlines() if f'{RUN_ID} ' in line]
    assert state in line


async def test_runs_are_printed_as_json(run) -> None:
    """The option `--json` prints the runs as one JSON document, with their labels, names and states."""
    result = await run('runs', '--json')
    (found,) = [item for item in json.loads(result.output) if item['run'] == RUN_ID]
    assert found['state'] == 'idle'
    assert found['name'] == found['labels'].get('name', '')
    assert {'base_model', 'lora_rank', 'steps', 'version', 'is_active', 'create_time'} <= found.keys()


async def test_ids_of_runs_stay_whole_in_a_narrow_terminal(gateway: FakeGateway, run) -> None:
    """If the terminal is too narrow for the table, each id is on one line, so that it can be copied."""
    gateway.run_ids = (f'ad-{"0123456789abcdef" * 8}', f'ad-{"f" * 32}')
    output = (await run('runs')).output
    assert all(run_id in output for run_id in gateway.run_ids)


@pytest.mark.parametrize('text', ['name', '=x'])
async def test_label_without_a_value_is_refused(gateway: FakeGateway, run, text: str) -> None:
    """A label that does not have the form NAME=VALUE is refused before a request is sent."""
    result = await run('runs', '--label', text)
    assert (result.exit_code, '--label: expected NAME=VALUE' in result.output) == (1, True)
    assert not gateway.calls['ListRuns']


async def test_runs_are_filtered_by_label(gateway: FakeGateway, run) -> None:
    """`--label` is sent as a filter, and a value may contain an equals sign."""
    await run('runs', '--label', 'name=a=b', '--label', 'team=blue')
    assert dict(gateway.calls['ListRuns'][0].user_metadata) == {'name': 'a=b', 'team': 'blue'}
