"""Several trainers of one base model in one stack, started by `twinkle up --trainers 2`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fixtures.tiny_model import build_tiny_model
from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.cli import app
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BATCH = [{'input_ids': list(range(first, first + 12)), 'labels': list(range(1, 13))} for first in range(5, 8)]
NAMES = ('first', 'second')


@pytest.mark.parametrize('trainers_after_restart', [2, 1])
def test_runs_continue_after_a_restart(tmp_path: Path, trainers_after_restart: int) -> None:
    """Runs of two trainers continue after a restart, even with one trainer, which takes over the other runs."""
    base_model, folder = str(build_tiny_model(tmp_path / 'tiny')), tmp_path / 'stack'
    with _stack(folder, base_model, trainer_count=2) as (_, client):
        model = MultiLoraTransformersModel(base_model, client=client)
        run_ids = {name: _created(model, name) for name in NAMES}
        losses = {name: [_step(model, name)] for name in NAMES}
    with _stack(folder, base_model, trainer_count=trainers_after_restart) as (output, client):
        is_reduced = trainers_after_restart == 1
        assert ('model-trainer-2 of an earlier start is not running' in output) == is_reduced
        if is_reduced:
            assert '1 runs of model-trainer-2' in _run(
                'fleet', 'take-over', 'model-trainer-2', '--model', base_model, folder=folder
            )
        model = MultiLoraTransformersModel(base_model, client=client)
        for name, run_id in run_ids.items():
            model.attach_adapter(name, run_id)
            losses[name] += [_step(model, name), _step(model, name)]
    # Both runs have the same seed and data, so the comparison of their losses shows a lost or repeated step.
    assert losses['first'] == losses['second']
    assert losses['first'] == sorted(losses['first'], reverse=True)


@contextmanager
def _stack(folder: Path, base_model: str, *, trainer_count: int) -> Iterator[tuple[str, TwinkleClient]]:
    """Run a stack without samplers; yield the output of its start and a client."""
    options = ('--model', base_model, '--samplers', '0', '--trainers', str(trainer_count), '--detach')
    output = _run('up', *options, folder=folder)
    try:
        state = StackState.load(folder)
        assert state is not None
        with TwinkleClient(state.address, state.read_api_key()) as client:
            trainers = [info for info in client.get_server_info().services if info.service == 'model']
            assert len(trainers) == trainer_count
            assert _run('status', folder=folder).count('serving') == len(state.services)
            yield output, client
    finally:
        _run('down', folder=folder)


def _run(*arguments: str, folder: Path) -> str:
    result = CliRunner().invoke(app, [*arguments, '--state-dir', str(folder)], env={'COLUMNS': '400'})
    assert result.exit_code == 0, result.output
    return result.output


def _created(model: MultiLoraTransformersModel, name: str) -> str:
    run_id = model.add_adapter_to_model(name, LoraConfig(r=4, seed=3))
    model.set_optimizer('AdamW', lr=1e-2, adapter_name=name)
    return run_id


def _step(model: MultiLoraTransformersModel, name: str) -> Any:
    loss = model.forward_backward(BATCH, adapter_name=name)['loss']
    model.clip_grad_and_step(adapter_name=name)
    return loss
