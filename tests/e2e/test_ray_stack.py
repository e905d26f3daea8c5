"""A stack whose processes run on a Ray cluster."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import yaml

from fixtures.ray_cluster import CORES, RayCluster, ray_cluster
from fixtures.tiny_model import build_tiny_model
from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler
from twinkle_client.stack import (
    ServiceState,
    StackOptions,
    StackState,
    add_sampler,
    revive_stack,
    start_stack,
    stop_stack,
)
from twinkle_client.stack.hosts import LocalProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
ELSEWHERE = '127.0.0.9:4000'
"""An address that no process of these tests uses."""
FEATURES = [{'input_ids': list(range(first, first + 12)), 'labels': list(range(1, 13))} for first in range(5, 8)]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """A Ray cluster of two nodes; after the test, this process closes its connection to the cluster."""
    monkeypatch.setenv('RAY_AUTH_MODE', 'disabled')
    with ray_cluster() as cluster:
        yield cluster
        ray.shutdown()


@pytest.fixture
def stack(cluster: RayCluster, tmp_path: Path) -> Iterator[StackState]:
    """A running stack on the cluster, from a configuration file as for `twinkle up --config`.

    The trainer needs all cores of the second node, so the samplers are on the first one.
    """
    model, file = build_tiny_model(tmp_path / 'tiny'), tmp_path / 'stack.yaml'
    file.write_text(
        f'base_model: {model}\nengine: torch\nray_address: {cluster.address}\n'
        f'resources: {{model: {{CPU: {CORES[1]}}}, sampler: {{CPU: 1}}}}\n'
    )
    state = start_stack(StackOptions(state_dir=tmp_path / 'stack').with_file(file), report=_silent)
    try:
        yield state
    finally:
        stop_stack(state.state_dir, report=_silent)


def test_training_continues_after_processes_and_actors_are_killed(stack: StackState) -> None:
    """The losses are those of a run without kills although the trainer, and later two actors, are killed.

    An added sampler serves the newest version. Stopping the stack ends all processes and actors.
    """

    def kill_processes(step: int) -> None:
        trainer, sampler = _service(stack, 'model'), _service(stack, 'sampler')
        if step == 1:
            _kill(trainer.pid, trainer)
        if step == 2:
            for service in (trainer, sampler):
                _kill(_parent(service.pid), service)
        if step in {1, 2}:
            assert revive_stack(stack.state_dir, report=_silent) is not None

    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        model = MultiLoraTransformersModel(stack.base_model, client=client)
        undisturbed = _train(model, 'undisturbed', before_step=lambda step: None)
        assert _train(model, 'killed', before_step=kill_processes) == undisturbed
        version = model.publish_version(adapter_name='killed')
        added = add_sampler(stack.state_dir, engine='', report=_silent)
        assert added.process.is_running()
        sampler = Sampler(stack.base_model, client=client)
        sampler.sample('Hello', {'max_tokens': 4}, 'killed', version=version)
    running = [LocalProcess(item.pid, item.start_mark) for item in _loaded(stack).services]
    assert all(process.is_running() for process in running)
    stop_stack(stack.state_dir, report=_silent)
    assert not any(process.is_running() for process in running)
    assert ray.util.list_named_actors(all_namespaces=True) == []


def test_trainer_of_a_lost_node_continues_on_another_node(stack: StackState, cluster: RayCluster) -> None:
    """A trainer whose node is lost continues on a new node, at a new address that the gateway then uses."""
    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        model = MultiLoraTransformersModel(stack.base_model, client=client)
        undisturbed = _train(model, 'undisturbed', before_step=lambda step: None)

        def lose_the_node(step: int) -> None:
            if step == 1:
                lost = _service(stack, 'model')
                cluster.replace_node()
                _wait_for_end(lost)
                _record_other_machine(stack.state_dir)
                assert revive_stack(stack.state_dir, report=_silent) is not None
                found = _service(stack, 'model')
                assert found.is_running()
                assert found.address not in (lost.address, ELSEWHERE)

        assert _train(model, 'moved', before_step=lose_the_node) == undisturbed


def _train(model: MultiLoraTransformersModel, name: str, *, before_step: Callable[[int], None]) -> list[float]:
    model.add_adapter_to_model(name, LoraConfig(r=4, lora_dropout=0.1, seed=3))
    model.set_optimizer('AdamW', lr=1e-2, adapter_name=name)
    losses: list[float] = []
    for step in range(4):
        before_step(step)
        losses.append(model.forward_backward(inputs=FEATURES, adapter_name=name)['loss'])
        model.clip_grad_and_step(adapter_name=name)
    return losses


def _kill(pid: int, service: ServiceState) -> None:
    """Kill a service's process or its actor, and wait until the service has stopped."""
    os.kill(pid, signal.SIGKILL)
    _wait_for_end(service)


def _wait_for_end(service: ServiceState) -> None:
    while service.is_running():
        threading.Event().wait(0.1)


def _record_other_machine(state_dir: Path) -> None:
    """Change the trainer's recorded address, as if the lost node had been another machine."""
    state = StackState.load(state_dir)
    assert state is not None
    trainer = _service(state, 'model')
    state.with_service(replace(trainer, address=ELSEWHERE)).save()
    path = state_dir / 'config' / 'gateway.yaml'
    settings = yaml.safe_load(path.read_text())
    settings['upstreams']['models'] = [ELSEWHERE]
    path.write_text(yaml.safe_dump(settings))


def _service(stack: StackState, name: str) -> ServiceState:
    return next(service for service in _loaded(stack).services if service.name == name)


def _loaded(stack: StackState) -> StackState:
    state = StackState.load(stack.state_dir)
    assert state is not None
    return state


def _parent(pid: int) -> int:
    return int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])


def _silent(service: str, event: str) -> None:
    del service, event
