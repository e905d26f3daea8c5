"""The command line: every command explains itself, and wrong use ends with one line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twinkle.api.server.v1.server_service_pb2 import BaseModelInfo, ModelPatch, ServiceInfo
from twinkle.telemetry import SpanRecord
from twinkle_client.cli import app
from twinkle_client.cli.stack import differently_patched
from twinkle_client.cli.waterfall import waterfall
from twinkle_client.stack import StackOptions

COMMANDS = [
    'up',
    'status',
    'down',
    'estimate',
    'sample',
    'runs',
    'checkpoints',
    'download',
    'trace',
    'models get',
    'keys create',
]
runner = CliRunner()


@pytest.mark.parametrize('command', COMMANDS)
def test_command_explains_itself(command: str) -> None:
    """`--help` works for each."""
    result = runner.invoke(app, [*command.split(), '--help'])
    assert result.exit_code == 0
    assert 'Usage' in result.output


@pytest.mark.parametrize('arguments', [['status'], ['sample', 'hi'], ['runs'], ['estimate', 'm'], ['trace', '--last']])
def test_without_a_stack_it_says_so(arguments: list[str], tmp_path: Path) -> None:
    """Nothing runs in the folder: one line, status 1, no traceback."""
    result = runner.invoke(app, [*arguments, '--state-dir', str(tmp_path)])
    assert result.exit_code == 1
    assert 'Traceback' not in result.output


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
