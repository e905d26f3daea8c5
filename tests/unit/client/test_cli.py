"""Tests of the command line: help, refused options and stack files, durations, and the text of tables."""

import io
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from fixtures.span_folder import call_of, trace_id, write_spans
from twinkle.api.gateway.v1 import key_service_pb2
from twinkle.api.gateway.v1.fleet_service_pb2 import REPLICA_STATE_LOST, REPLICA_STATE_READY, Replica
from twinkle.api.sampler.v1.engine_pb2 import EngineLoad
from twinkle.api.server.v1.server_service_pb2 import BaseModelInfo, ModelPatch, ServiceInfo
from twinkle.telemetry import SpanRecord, trace_events
from twinkle_client import __version__
from twinkle_client.cli import app
from twinkle_client.cli.fleet import fleet_table
from twinkle_client.cli.keys import state_word
from twinkle_client.cli.session import print_table
from twinkle_client.cli.stack import differently_patched
from twinkle_client.cli.times import local_text, parse_duration
from twinkle_client.cli.waterfall import waterfall
from twinkle_client.stack import StackOptions

runner = CliRunner()


def commands(found: Any, *names: str) -> Iterator[str]:
    """Yield the names of a command and of the commands below it, without groups that do nothing alone."""
    if not isinstance(found, typer.core.TyperGroup) or (names and found.invoke_without_command):
        yield ' '.join(names)
    if isinstance(found, typer.core.TyperGroup):
        for name, item in found.commands.items():
            yield from commands(item, *names, name)


COMMANDS = sorted(commands(typer.main.get_command(app)))
WITHOUT_JSON = [
    # These commands run until the stack ends, or print one value or log lines.
    *('up', 'down', 'logs', 'console', 'fleet add', 'fleet join', 'models get', 'checkpoint download'),
    # These commands print nothing, one word or one sentence.
    *('checkpoint publish', 'checkpoint unpublish', 'checkpoint ttl', 'checkpoint delete', 'checkpoint cancel'),
    *('keys revoke', 'tenants create', 'projects create', 'fleet drain', 'fleet end-lease', 'fleet take-over'),
]


def test_all_commands_are_found() -> None:
    """The commands of groups, and groups that are commands, are found; the list without JSON has only commands."""
    assert {'estimate', 'run show', 'checkpoint verify', 'fleet', 'fleet end-lease'} < set(COMMANDS)
    assert not {'', 'run', 'checkpoint'} & set(COMMANDS)
    assert set(WITHOUT_JSON) < set(COMMANDS)


@pytest.mark.parametrize('command', COMMANDS)
def test_command_shows_its_help(command: str) -> None:
    """Every command supports `--help`."""
    result = runner.invoke(app, [*command.split(), '--help'])
    assert result.exit_code == 0
    assert 'Usage' in result.output


@pytest.mark.parametrize('command', sorted({*COMMANDS} - {*WITHOUT_JSON}))
def test_command_with_results_can_print_json(command: str) -> None:
    """Every command that prints more than one value has the option `--json`."""
    assert '--json' in runner.invoke(app, [*command.split(), '--help']).output


def test_version_is_that_of_the_package() -> None:
    """`twinkle --version` prints the version of the installed package."""
    result = runner.invoke(app, ['--version'])
    assert (result.exit_code, result.output) == (0, f'twinkle {version("twinkle-grpc")}\n')
    assert version('twinkle-grpc') == __version__


@pytest.mark.parametrize(
    'arguments',
    [['status'], ['logs'], ['console'], ['sample', 'hi'], ['runs'], ['estimate', 'm'], ['trace', '--last'], ['fleet']],
)
def test_command_without_a_stack_fails_without_a_traceback(arguments: list[str], tmp_path: Path) -> None:
    """A command that needs a stack exits with status 1 and without a traceback if the state folder has no stack."""
    result = runner.invoke(app, [*arguments, '--state-dir', str(tmp_path)])
    assert result.exit_code == 1
    assert 'Traceback' not in result.output


def test_version_without_an_adapter_is_refused_before_any_call() -> None:
    """If `--version` is used without `--adapter`, the error names the missing option."""
    result = runner.invoke(app, ['sample', 'hi', '--version', '3'])
    assert result.exit_code == 1
    assert '--adapter' in result.output


def test_down_without_a_stack_is_no_error(tmp_path: Path) -> None:
    """`twinkle down` succeeds when no stack is running."""
    assert runner.invoke(app, ['down', '--state-dir', str(tmp_path)]).exit_code == 0


def test_stack_file_is_checked(tmp_path: Path) -> None:
    """Unknown keys are refused, and the sections of services are passed to the services."""
    path = tmp_path / 'stack.yaml'
    path.write_text('base_model: tiny\nmodel: {thread_count: 1}\n')
    options = StackOptions(state_dir=tmp_path).with_file(path)
    assert (options.base_model, options.services) == ('tiny', {'model': {'thread_count': 1}})
    path.write_text('modle: {}\n')
    with pytest.raises(ValueError, match='modle: unknown field; did you mean model'):
        StackOptions(state_dir=tmp_path).with_file(path)


def test_patches_of_a_stack_keep_their_order(tmp_path: Path) -> None:
    """Patches are a top-level key of the stack file and keep the order of the file."""
    path = tmp_path / 'stack.yaml'
    path.write_text('patches: {Second: {}, First: {factor: 2.0}}\n')
    options = StackOptions(state_dir=tmp_path).with_file(path)
    assert list(options.patches.items()) == [('Second', {}), ('First', {'factor': 2.0})]


def test_models_with_different_patches_are_listed() -> None:
    """A model whose services have different patch options is listed; services without a model are ignored."""

    def service_with_model(service: str, *factors: float) -> ServiceInfo:
        patches = [ModelPatch(name='RopeScalingPatch', options={'factor': factor}) for factor in factors]
        return ServiceInfo(service=service, base_models=[BaseModelInfo(base_model='tiny', patches=patches)])

    data = ServiceInfo(service='data')
    assert differently_patched([service_with_model('model', 2.0), data, service_with_model('sampler', 2.0)]) == []
    assert differently_patched([service_with_model('model', 2.0), service_with_model('sampler', 4.0)]) == ['tiny']
    assert differently_patched([service_with_model('model'), service_with_model('sampler', 2.0)]) == ['tiny']


INVALID_FILES = [b'patches: 5', b'base_model: 5', b'model: 5', b'listen: [1]', b'{', bytes(range(128, 160))]


@pytest.mark.parametrize('content', INVALID_FILES)
def test_stack_file_with_a_wrong_value_is_refused(content: bytes, tmp_path: Path) -> None:
    """The error for a wrong value in a stack file names the file."""
    path = tmp_path / 'stack.yaml'
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r'stack\.yaml'):
        StackOptions(state_dir=tmp_path).with_file(path)


def test_trace_shows_children_below_their_parents(tmp_path: Path) -> None:
    """`trace --last` shows the latest call as a tree and skips background calls."""
    spans = [
        _span('a', '', 'client', 'pkg.TrainingService/Execute', (0, 100)),
        _span('c', 'b', 'model', 'forward_backward', (20, 90)),
        _span('b', 'a', 'gateway', 'pkg.TrainingService/Execute', (10, 95)),
    ]
    lines = [json.dumps({**vars(span)}) for span in spans]
    lines.append(json.dumps(vars(_span('z', '', 'client', 'pkg.SessionService/Heartbeat', (500, 600), trace='9'))))
    own = replace(_span('y', '', 'gateway', 'pkg.AdapterService/ParkAdapter', (700, 800), trace='8'), kind='client')
    lines.append(json.dumps(vars(own)))
    loaded = replace(_span('x', '', 'sampler', 'new version', (900, 950), trace='7'), kind='internal')
    lines.append(json.dumps(vars(loaded)))
    (tmp_path / 'traces').mkdir()
    (tmp_path / 'traces' / 'client.jsonl').write_text('\n'.join(lines))
    table = waterfall(spans)
    assert [str(cell) for cell in table.columns[0].cells] == ['client', 'gateway', 'model']
    result = runner.invoke(app, ['trace', '--last', '--state-dir', str(tmp_path)])
    assert result.exit_code == 0
    assert 'forward_backward' in result.output
    assert 'Heartbeat' not in result.output
    listed = runner.invoke(app, ['trace', '--state-dir', str(tmp_path)]).output
    words = ('Execute', 'ParkAdapter', 'new version')
    assert [word in listed for word in words] == [True, False, False]


def test_a_trace_is_written_for_perfetto(tmp_path: Path) -> None:
    """`trace --perfetto` writes the events of a trace. Without a trace, or with a bad path, it writes nothing."""
    spans = call_of('alice', trace=1)
    write_spans(tmp_path / 'traces' / 'model.jsonl', spans)
    state, target = ['--state-dir', str(tmp_path)], tmp_path / 'trace.json'
    result = runner.invoke(app, ['trace', '--perfetto', str(target), *state])
    assert (result.exit_code, target.exists()) == (1, False)
    result = runner.invoke(app, ['trace', '--last', '--perfetto', str(tmp_path), *state])
    assert result.exit_code == 1
    assert '--perfetto' in result.output
    result = runner.invoke(app, ['trace', trace_id(1)[:31], '--perfetto', str(target), *state])
    assert result.exit_code == 0
    assert json.loads(target.read_text()) == trace_events(spans)


def _span(
    span_id: str, parent_id: str, service: str, name: str, times: tuple[int, int], *, trace: str = '1'
) -> SpanRecord:
    return SpanRecord(
        trace_id=trace * 32,
        span_id=span_id * 16,
        parent_id=parent_id * 16,
        service=service,
        name=name,
        kind='server',
        start_ns=times[0],
        end_ns=times[1],
    )


def test_fleet_fits_a_terminal() -> None:
    """The table of the fleet shows the id, state and load of every replica within 80 columns."""
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


def test_ids_are_never_broken(capsys: pytest.CaptureFixture[str]) -> None:
    """A table whose words need more space than the terminal has is wider than the terminal."""
    paths = [f'twinkle://ad-1m80cb0cxbkp8c2h28xd1v/weights/step-{number:06}-checkpoint' for number in range(2)]
    exports = ['ex-1m80cb0cxbkp8c2h28xd1v', 'ex-1m80cb4gatnjvjr7zsh8q2']
    table = Table('export', 'checkpoint', 'target', 'result')
    for export, path in zip(exports, paths, strict=True):
        table.add_row(export, path, 'hf://lab/model-with-a-long-name', 'https://hub.example/' + 'x' * 80)
    address = 'twinkle-sampler-0.twinkle-sampler.production.svc.cluster.local:7103'
    replica = Replica(replica_id='rp-1m80cb0cxbkp8c2h28xd1v', service='sampler', address=address)
    for shown in (table, fleet_table([replica], now=datetime.now(UTC))):
        print_table(shown)
    text = capsys.readouterr().out
    for word in (*exports, *paths, replica.replica_id, address):
        assert word in text


@pytest.mark.parametrize(
    ('times', 'word'),
    [
        ({}, 'good'),
        ({'expire_time': 1}, 'good until'),
        ({'expire_time': -1}, 'expired'),
        ({'expire_time': 1, 'retire_time': -1}, 'replaced'),
        ({'expire_time': -2, 'retire_time': -1}, 'expired'),
        ({'expire_time': 1, 'revoke_time': -1}, 'revoked'),
    ],
)
def test_list_of_keys_shows_their_state(times: dict[str, int], word: str) -> None:
    """The state names the event that first invalidated the key; a valid key is 'good'. Times are in days from now."""
    key = key_service_pb2.ApiKey()
    for name, days in times.items():
        getattr(key, name).FromDatetime(datetime.now(UTC) + timedelta(days=days))
    assert state_word(key).startswith(word)


@pytest.mark.parametrize(
    ('text', 'seconds'), [('90s', 90), ('12h', 43200), ('30d', 2592000), ('0s', 0), ('2w', 1209600)]
)
def test_durations_are_parsed(text: str, seconds: int) -> None:
    """A duration is a whole number followed by a unit."""
    assert parse_duration(text).total_seconds() == seconds


@pytest.mark.parametrize('text', ['', '5', 'h', '-1h', '1.5h', '1y', '9' * 12 + 'w', '999999999w'])
def test_malformed_duration_is_refused(text: str) -> None:
    """BadParameter is raised for text that is not a whole number with a unit, and for a duration that is too long."""
    with pytest.raises(typer.BadParameter):
        parse_duration(text)


@pytest.mark.parametrize('word', ['checkpoints', 'download'])
def test_checkpoint_commands_have_one_prefix(word: str) -> None:
    """Checkpoint commands exist under `twinkle checkpoint` only."""
    assert runner.invoke(app, [word, '--help']).exit_code != 0
    assert runner.invoke(app, ['checkpoint', '--help']).exit_code == 0


@pytest.fixture
def _restored_time_zone() -> Iterator[None]:
    """Call `time.tzset` after `monkeypatch` has restored TZ. This fixture is therefore set up before `monkeypatch`."""
    yield
    time.tzset()


@pytest.mark.usefixtures('_restored_time_zone')
def test_times_are_shown_in_the_local_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are shown in the local time zone, to the minute; an unset time is an empty string."""
    monkeypatch.setenv('TZ', 'JST-9')
    time.tzset()
    moment = Timestamp()
    assert local_text(moment) == ''
    moment.FromDatetime(datetime(2026, 1, 1, 23, 30, 59, tzinfo=UTC))
    assert local_text(moment) == '2026-01-02 08:30'
