"""A stack whose model service runs in two processes that torchrun starts."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.tiny_model import build_tiny_model
from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.stack import StackOptions, StackState, revive_stack, start_stack, stop_stack
from twinkle_client.stack.process_ids import end_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FEATURES = [{'input_ids': list(range(first, first + 12)), 'labels': list(range(1, 13))} for first in range(5, 8)]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[StackState]:
    """A running stack with a mesh, from a configuration file as for `twinkle up --config`."""
    model = build_tiny_model(tmp_path / 'tiny')
    file = tmp_path / 'stack.yaml'
    file.write_text(
        f'base_model: {model}\nengine: torch\nfull_parameters: true\nmodel:\n  mesh: {{fsdp: 2}}\n  pass_tokens: 24\n'
    )
    options = StackOptions(state_dir=tmp_path / 'stack').with_file(file)
    state = start_stack(options, report=_silent)
    try:
        yield state
    finally:
        stop_stack(state.state_dir, report=_silent)


def test_training_continues_after_a_process_of_the_mesh_is_killed(stack: StackState) -> None:
    """If a rank is killed during a batch and the stack is revived, training has the results of a run without kills.

    Stopping the stack then ends all processes of the mesh. Replaying the journal in one process gives no difference.
    """
    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        model = MultiLoraTransformersModel(stack.base_model, client=client)
        undisturbed = _train(model, 'undisturbed', at_midpoint=lambda: None)
        disturbed = _train(model, 'killed', at_midpoint=lambda: _kill_and_revive(stack))
    assert disturbed['losses'] == undisturbed['losses']
    np.testing.assert_array_equal(disturbed['logps'], undisturbed['logps'])
    assert len(_processes_of(stack)) == 2
    stop_stack(stack.state_dir, report=_silent)
    assert _processes_of(stack) == []
    replayed = _replay(stack)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert 'error' not in replayed.stdout


def test_full_parameter_run_continues_after_a_process_of_the_mesh_is_killed(stack: StackState) -> None:
    """If a rank is killed, a full-parameter run over `fsdp` has the results of a run without kills on the same mesh.

    The run's checkpoint is a complete model, from which the next run continues.
    """
    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        model = MultiLoraTransformersModel(stack.base_model, client=client)
        undisturbed = _train_all(model, 'undisturbed', at_midpoint=lambda: None)
        disturbed = _train_all(model, 'killed', at_midpoint=lambda: _kill_and_revive(stack))
        assert disturbed['losses'] == undisturbed['losses']
        assert undisturbed['losses'][-1] < undisturbed['losses'][0]
        np.testing.assert_array_equal(disturbed['logps'], undisturbed['logps'])
        model.add_adapter_to_model('continued', disturbed['checkpoint'], full_parameters=True)
        logps = np.concatenate(model.forward_only(FEATURES, adapter_name='continued')['logps'])
        np.testing.assert_array_equal(logps, disturbed['logps'])
    stop_stack(stack.state_dir, report=_silent)
    replayed = _replay(stack)
    assert (replayed.returncode, 'left out' in replayed.stdout) == (2, True)


def _replay(stack: StackState) -> subprocess.CompletedProcess[str]:
    """Replay the journal of a stopped stack in one process."""
    config = stack.state_dir / 'config' / 'model.yaml'
    journal = stack.state_dir / 'data' / 'model' / 'journal'
    command = [
        sys.executable,
        '-m',
        'twinkle_services.model.replay',
        '--journal',
        str(journal),
        '--config',
        str(config),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _kill_and_revive(stack: StackState) -> None:
    """Kill the last rank of the mesh, stop the launcher if it still runs, and start the mesh again."""
    launcher = next(service for service in stack.services if service.name == 'model')
    ranks = _processes_of(stack)
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    assert end_process(launcher.pid, launcher.start_mark, grace_seconds=30)
    assert revive_stack(stack.state_dir, report=_silent) is not None


def _train(model: MultiLoraTransformersModel, name: str, *, at_midpoint: Callable[[], None]) -> dict[str, Any]:
    model.add_adapter_to_model(name, LoraConfig(r=4, lora_dropout=0.1, seed=3))
    model.set_optimizer('AdamW', lr=1e-2, adapter_name=name)
    return _results(model, name, at_midpoint=at_midpoint)


def _train_all(model: MultiLoraTransformersModel, name: str, *, at_midpoint: Callable[[], None]) -> dict[str, Any]:
    """Train all weights, save them, and end the lease."""
    model.add_adapter_to_model(name, full_parameters=True)
    model.set_optimizer('AdamW', lr=1e-3, adapter_name=name)
    results = _results(model, name, at_midpoint=at_midpoint)
    checkpoint = model.save(name, adapter_name=name, save_optimizer=True)
    model.remove_adapter(name)
    return {**results, 'checkpoint': checkpoint}


def _results(model: MultiLoraTransformersModel, name: str, *, at_midpoint: Callable[[], None]) -> dict[str, Any]:
    losses: list[float] = []
    for step in range(4):
        batch = model.forward_backward.submit(FEATURES, adapter_name=name)
        if step == 2:
            at_midpoint()
        losses.append(batch.result()['loss'])
        model.clip_grad_and_step(adapter_name=name)
    return {'losses': losses, 'logps': np.concatenate(model.forward_only(FEATURES, adapter_name=name)['logps'])}


def _processes_of(stack: StackState) -> list[int]:
    """Return the process ids of the ranks of a stack's model service."""
    config = str(stack.state_dir / 'config' / 'model.yaml')
    pattern = f'-m twinkle_services.model --config {config}'
    found = subprocess.run(['pgrep', '-f', '--', pattern], capture_output=True, text=True, check=False)
    pids = [int(pid) for pid in found.stdout.split()]
    return [pid for pid in pids if 'torch.distributed.run' not in Path(f'/proc/{pid}/cmdline').read_text()]


def _silent(service: str, event: str) -> None:
    del service, event
