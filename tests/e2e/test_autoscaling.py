"""`twinkle up` adapts the number of samplers to the load, on this machine and on a Ray cluster."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import ray

from fixtures.ray_cluster import CORES, ray_cluster
from fixtures.source_tree import ROOT
from fixtures.tiny_model import build_tiny_model
from twinkle_client import TwinkleClient
from twinkle_client.sampler import Sampler
from twinkle_client.stack import StackState
from twinkle_client.stack.hosts import LocalProcess
from twinkle_client.stack.spawning import service_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SECTION = """engine: torch
sampler: {torch: {max_num_seqs: 2}}
autoscaling: {max_samplers: 5, grow_seconds: 1, shrink_seconds: 3}
"""
PARAMS = {'max_tokens': 100, 'temperature': 1.0}


@pytest.fixture(params=['local', 'ray'])
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Configuration of a stack with two slots per sampler, on this machine or on a Ray cluster of two nodes."""
    file = tmp_path / 'stack.yaml'
    text = f'base_model: {build_tiny_model(tmp_path / "tiny")}\n{SECTION}'
    with ExitStack() as stack:
        if request.param == 'ray':
            monkeypatch.setenv('RAY_AUTH_MODE', 'disabled')
            address = stack.enter_context(ray_cluster()).address
            stack.callback(ray.shutdown)
            # The trainer needs all cores of the second node.
            text += f'ray_address: {address}\nresources: {{model: {{CPU: {CORES[1]}}}, sampler: {{CPU: 1}}}}\n'
        file.write_text(text)
        yield file


def test_samplers_follow_the_load(config: Path, tmp_path: Path) -> None:
    """A sampler is added while requests wait and removed afterwards; no request fails, and all samplers exit."""
    with _running(config, tmp_path) as (process, state):
        samplers = [_sampler_processes(state.state_dir)]
        with _load(state):
            _wait(process, lambda: len(_ready(state.state_dir)) == 2)
            samplers.append(_sampler_processes(state.state_dir))
        _wait(process, lambda: len(_ready(state.state_dir)) == 1)
        assert _ready(state.state_dir) == ['sampler']
        process.send_signal(signal.SIGINT)
        process.wait()
    log = (tmp_path / 'up.log').read_text()
    assert 'requests wait at all samplers' in log
    assert 'sampler-2 is no longer needed' in log
    assert 'Traceback' not in log
    assert not any(found.is_running() for found in samplers[-1])
    assert StackState.load(state.state_dir) is None


@contextmanager
def _running(config: Path, folder: Path) -> Iterator[tuple['subprocess.Popen[bytes]', StackState]]:
    """Run `twinkle up`, and yield its process and the stack once all services have started."""
    options = ['--config', str(config), '--state-dir', str(folder / 'state')]
    with (folder / 'up.log').open('wb') as log:
        command = [sys.executable, '-u', '-m', 'twinkle_client.cli', 'up', *options]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        _wait(process, lambda: 'Ctrl-C' in (folder / 'up.log').read_text())
        state = StackState.load(folder / 'state')
        assert state is not None
        yield process, state
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


@contextmanager
def _load(state: StackState) -> Iterator[None]:
    """Keep six requests running during the block; all of them must succeed."""
    ended = threading.Event()

    def sample(client: TwinkleClient) -> None:
        sampler = Sampler(state.base_model, client=client)
        while not ended.is_set():
            sampler.sample('Hello', PARAMS)

    with TwinkleClient(state.address, state.read_api_key()) as client, ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(sample, client) for _ in range(6)]
        try:
            yield
        finally:
            ended.set()
        for call in calls:
            call.result()


def _ready(folder: Path) -> list[str]:
    """Return the names of the samplers that have joined and are not leaving."""
    state = StackState.load(folder)
    assert state is not None
    return [item.name for item in state.services if service_of(item.name) == 'sampler' and item.is_restarted]


def _sampler_processes(folder: Path) -> list[LocalProcess]:
    state = StackState.load(folder)
    assert state is not None
    found = [item for item in state.services if service_of(item.name) == 'sampler']
    return [LocalProcess(item.pid, item.start_mark) for item in found]


def _wait(process: 'subprocess.Popen[bytes]', condition: Callable[[], bool]) -> None:
    while not condition():
        assert process.poll() is None
        threading.Event().wait(0.2)
