"""The command line: every command explains itself, and wrong use ends with one line."""

import io
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from typer.testing import CliRunner

from twinkle.api.gateway.v1 import key_service_pb2
from twinkle.api.gateway.v1.fleet_service_pb2 import REPLICA_STATE_LOST, REPLICA_STATE_READY, Replica
from twinkle.api.sampler.v1.engine_pb2 import EngineLoad
from twinkle.api.server.v1.server_service_pb2 import BaseModelInfo, ModelPatch, ServiceInfo
from twinkle.telemetry import SpanRecord
from twinkle_client.cli import app
from twinkle_client.cli.fleet import fleet_table
from twinkle_client.cli.keys import state_word
from twinkle_client.cli.stack import differently_patched
from twinkle_client.cli.times import local_text, parse_duration
from twinkle_client.cli.waterfall import waterfall
from twinkle_client.stack import StackOptions

COMMANDS = [
    'up',
    'status',
    'down',
    'estimate',
    'sample',
    'runs',
    'checkpoint list',
    'checkpoint download',
    'checkpoint upload',
    'checkpoint publish',
    'checkpoint unpublish',
    'checkpoint ttl',
    'checkpoint delete',
    'checkpoint push',
    'checkpoint exports',
    'checkpoint cancel',
    'trace',
    'models get',
    'usage',
    'quota show',
    'quota set',
    'keys create',
    'keys list',
    'keys rotate',
    'keys revoke',
    'tenants create',
    'tenants list',
    'projects create',
    'projects list',
    'fleet',
    'fleet add',
    'fleet join',
    'fleet drain',
]
runner = CliRunner()


@pytest.mark.parametrize('command', COMMANDS)
def test_command_explains_itself(command: str) -> None:
    """`--help` works for each."""
    result = runner.invoke(app, [*command.split(), '--help'])
    assert result.exit_code == 0
    assert 'Usage' in result.output


@pytest.mark.parametrize(
    'arguments', [['status'], ['sample', 'hi'], ['runs'], ['estimate', 'm'], ['trace', '--last'], ['fleet']]
)
def test_without_a_stack_it_says_so(arguments: list[str], tmp_path: Path) -> None:
    """Nothing runs in the folder: one line, status 1, no traceback."""
    result = runner.invoke(app, [*arguments, '--state-dir', str(tmp_path)])
    assert result.exit_code == 1
    assert 'Traceback' not in result.output


def test_a_version_of_the_base_model_is_refused_before_anybody_is_asked() -> None:
    """The option that is missing is named."""
    result = runner.invoke(app, ['sample', 'hi', '--version', '3'])
    assert result.exit_code == 1
    assert '--adapter' in result.output


def test_down_without_a_stack_is_no_error(tmp_path: Path) -> None:
    """Stopping what does not run is done at once."""
    assert runner.invoke(app, ['down', '--state-dir', str(tmp_path)]).exit_code == 0


def test_stack_file_is_checked(tmp_path: Path) -> None:
    """Keys that mean nothing are refused; those of services are kept for them."""
    path = tmp_path / 'stack.yaml'
    path.write_text('base_model: tiny\nmodel: {thread_count: 1}\n')
    options = StackOptions(state_dir=tmp_path).with_file(path)
    assert (options.base_model, options.services) == ('tiny', {'model': {'thread_count': 1}})
    path.write_text('modle: {}\n')
    with pytest.raises(ValueError, match='modle'):
        StackOptions(state_dir=tmp_path).with_file(path)


def test_patches_of_a_stack_are_told_once(tmp_path: Path) -> None:
    """They stand beside the base model, in the order of the file."""
    path = tmp_path / 'stack.yaml'
    path.write_text('patches: {Second: {}, First: {factor: 2.0}}\n')
    options = StackOptions(state_dir=tmp_path).with_file(path)
    assert list(options.patches.items()) == [('Second', {}), ('First', {'factor': 2.0})]


def test_models_loaded_in_two_ways_are_named() -> None:
    """Another option is another model; services that hold none do not count."""

    def holding(service: str, *factors: float) -> ServiceInfo:
        patches = [ModelPatch(name='RopeScalingPatch', options={'factor': factor}) for factor in factors]
        return ServiceInfo(service=service, base_models=[BaseModelInfo(base_model='tiny', patches=patches)])

    data = ServiceInfo(service='data')
    assert differently_patched([holding('model', 2.0), data, holding('sampler', 2.0)]) == []
    assert differently_patched([holding('model', 2.0), holding('sampler', 4.0)]) == ['tiny']
    assert differently_patched([holding('model'), holding('sampler', 2.0)]) == ['tiny']


WRONG_FILES = [b'patches: 5', b'base_model: 5', b'model: 5', b'listen: [1]', b'{', bytes(range(128, 160))]


@pytest.mark.parametrize('content', WRONG_FILES)
def test_stack_file_with_a_wrong_value_is_refused(content: bytes, tmp_path: Path) -> None:
    """The message names the file, and the key where there is one."""
    path = tmp_path / 'stack.yaml'
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r'stack\.yaml'):
        StackOptions(state_dir=tmp_path).with_file(path)


def test_trace_shows_children_below_their_parents(tmp_path: Path) -> None:
    """The latest call is found among the background noise and drawn as a tree."""
    spans = [
        _span('a', '', 'client', 'pkg.TrainingService/Execute', (0, 100)),
        _span('c', 'b', 'model', 'forward_backward', (20, 90)),
        _span('b', 'a', 'gateway', 'pkg.TrainingService/Execute', (10, 95)),
    ]
    lines = [json.dumps({**vars(span)}) for span in spans]
    lines.append(json.dumps(vars(_span('z', '', 'client', 'pkg.SessionService/Heartbeat', (500, 600), trace='9'))))
    (tmp_path / 'traces').mkdir()
    (tmp_path / 'traces' / 'client.jsonl').write_text('\n'.join(lines))
    table = waterfall(spans)
    assert [str(cell) for cell in table.columns[0].cells] == ['client', 'gateway', 'model']
    result = runner.invoke(app, ['trace', '--last', '--state-dir', str(tmp_path)])
    assert result.exit_code == 0
    assert 'forward_backward' in result.output
    assert 'Heartbeat' not in result.output


def _span(
    span_id: str, parent_id: str, service: str, name: str, times: tuple[int, int], *, trace: str = '1'
) -> SpanRecord:
    return SpanRecord(
        trace_id=trace * 32,
        span_id=span_id,
        parent_id=parent_id,
        service=service,
        name=name,
        kind='server',
        start_ns=times[0],
        end_ns=times[1],
    )


def test_fleet_fits_a_terminal() -> None:
    """Every replica's id, state and load can be read in 80 columns."""
    load = EngineLoad(running_sequence_count=12, max_sequence_count=256, waiting_sequence_count=3, kv_usage=0.5)
    ids = ['rp-1m80cb0cxbkp8c2h28xd1v', 'rp-1m80cb4gatnjvjr7zsh8q2']
    replicas = [
        Replica(replica_id=ids[0], engine='vllm', address='127.0.0.1:44651', state=REPLICA_STATE_READY, load=load),
        Replica(replica_id=ids[1], service='sampler', address='10.0.0.1:7103', state=REPLICA_STATE_LOST),
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(fleet_table(replicas, now=datetime.now(UTC)))
    text = console.export_text()
    for word in (*ids, 'ready', 'lost', '12/256 +3', '50%', '127.0.0.1:44651 vllm'):
        assert word in text


@pytest.mark.parametrize(
    ('ends', 'word'),
    [
        ({}, 'good'),
        ({'expire_time': 1}, 'good until'),
        ({'expire_time': -1}, 'expired'),
        ({'expire_time': 1, 'retire_time': -1}, 'replaced'),
        ({'expire_time': -2, 'retire_time': -1}, 'expired'),
        ({'expire_time': 1, 'revoke_time': -1}, 'revoked'),
    ],
)
def test_list_of_keys_tells_which_still_work(ends: dict[str, int], word: str) -> None:
    """What ended first is told; a key that works tells until when. Moments are days from now."""
    key = key_service_pb2.ApiKey()
    for name, days in ends.items():
        getattr(key, name).FromDatetime(datetime.now(UTC) + timedelta(days=days))
    assert state_word(key).startswith(word)


@pytest.mark.parametrize(
    ('text', 'seconds'), [('90s', 90), ('12h', 43200), ('30d', 2592000), ('0s', 0), ('2w', 1209600)]
)
def test_lengths_of_time_are_read(text: str, seconds: int) -> None:
    """A number and a unit."""
    assert parse_duration(text).total_seconds() == seconds


@pytest.mark.parametrize('text', ['', '5', 'h', '-1h', '1.5h', '1y', '9' * 12 + 'w', '999999999w'])
def test_what_is_no_length_of_time_is_refused(text: str) -> None:
    """The message says what one looks like."""
    with pytest.raises(typer.BadParameter):
        parse_duration(text)


@pytest.mark.parametrize('word', ['checkpoints', 'download'])
def test_what_is_done_with_checkpoints_has_one_word(word: str) -> None:
    """`twinkle checkpoint`, and no other beside it."""
    assert runner.invoke(app, [word, '--help']).exit_code != 0
    assert runner.invoke(app, ['checkpoint', '--help']).exit_code == 0


@pytest.fixture
def _zone_of_before() -> Iterator[None]:
    """Set up before the environment is changed, so that it ends after that is undone."""
    yield
    time.tzset()


@pytest.mark.usefixtures('_zone_of_before')
def test_moments_are_shown_in_the_zone_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the minute; one that is not set is shown as nothing."""
    monkeypatch.setenv('TZ', 'JST-9')
    time.tzset()
    moment = Timestamp()
    assert local_text(moment) == ''
    moment.FromDatetime(datetime(2026, 1, 1, 23, 30, 59, tzinfo=UTC))
    assert local_text(moment) == '2026-01-02 08:30'
