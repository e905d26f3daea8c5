"""The model service of a complete stack is killed during a client's training loop."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.tiny_model import build_tiny_model
from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.stack import StackOptions, StackState, start_stack, stop_stack

pytestmark = pytest.mark.timeout(300)

STEPS = 6
FEATURES = [
    {'input_ids': list(range(5 + index, 17 + index)), 'labels': list(range(6 + index, 18 + index))}
    for index in range(3)
]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[StackState]:
    """A running stack."""
    model = build_tiny_model(tmp_path / 'tiny')
    options = StackOptions(state_dir=tmp_path / 'stack', base_model=str(model), engine='torch')
    state = start_stack(options, report=lambda *_: None)
    try:
        yield state
    finally:
        stop_stack(state.state_dir, report=lambda *_: None)


@pytest.mark.slow
def test_training_loop_continues_after_the_model_service_is_killed(stack: StackState) -> None:
    """A loop whose service is killed and restarted gives results bitwise equal to those of a loop without a kill."""
    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        model = MultiLoraTransformersModel(stack.base_model, client=client)
        undisturbed = _train(model, 'undisturbed', at_midpoint=lambda: None)
        with _restarting(stack) as kill_and_restart:
            disturbed = _train(model, 'killed', at_midpoint=kill_and_restart)
            assert model.get_adapter(adapter_name='killed').step_count == STEPS
            version = model.publish_version(adapter_name='killed')
    assert disturbed['losses'] == undisturbed['losses']
    np.testing.assert_array_equal(disturbed['logps'], undisturbed['logps'])
    assert version == 1


def _train(model: MultiLoraTransformersModel, name: str, *, at_midpoint: Callable[[], None]) -> dict[str, Any]:
    model.add_adapter_to_model(name, LoraConfig(r=4, lora_dropout=0.1, seed=3))
    model.set_optimizer('AdamW', lr=1e-2, adapter_name=name)
    losses: list[float] = []
    for step in range(STEPS):
        batch = model.forward_backward.submit(FEATURES, adapter_name=name)
        if step == STEPS // 2:
            at_midpoint()
        losses.append(batch.result()['loss'])
        model.clip_grad_and_step(adapter_name=name)
    return {'losses': losses, 'logps': np.concatenate(model.forward_only(FEATURES, adapter_name=name)['logps'])}


@contextmanager
def _restarting(stack: StackState) -> Iterator[Callable[[], None]]:
    """Yield a function that kills the model service and restarts it at its address; finally, stop the new process."""
    service = next(service for service in stack.services if service.name == 'model')
    started: list[subprocess.Popen[bytes]] = []

    def kill_and_restart() -> None:
        os.kill(service.pid, signal.SIGKILL)
        config = stack.state_dir / 'config' / 'model.yaml'
        command = [
            sys.executable,
            '-m',
            'twinkle_services.model',
            '--config',
            str(config),
            '--set',
            f'listen={service.address}',
        ]
        with Path(service.log_path).open('ab') as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=stack.state_dir))

    try:
        yield kill_and_restart
    finally:
        for process in started:
            process.terminate()
            process.wait()
