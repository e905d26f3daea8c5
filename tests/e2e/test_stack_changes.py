"""Changes of a running stack: samplers join and leave, and a killed gateway is restarted."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fixtures.tiny_model import build_tiny_model
from twinkle_client import TwinkleClient
from twinkle_client.cli import app
from twinkle_client.fleet import FleetAdministration
from twinkle_client.sampler import Sampler
from twinkle_client.stack import StackOptions, StackState, add_sampler, revive_stack, start_stack, stop_stack
from twinkle_client.stack.process_ids import end_process
from twinkle_client.stack.spawning import read_address

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """State folder of a running stack that started without a sampler."""
    model = build_tiny_model(tmp_path_factory.mktemp('model'))
    folder = tmp_path_factory.mktemp('stack')
    start_stack(StackOptions(state_dir=folder, base_model=str(model), engine='torch', sampler_count=0), report=_silent)
    yield folder
    stop_stack(folder, report=_silent)


@pytest.mark.slow
def test_sampler_joins_and_leaves_a_stack(folder: Path) -> None:
    """A sampler can join a stack without samplers, and is not restarted after it is drained."""
    added = add_sampler(folder, engine='', report=_silent)
    state = _load_state(folder)
    with TwinkleClient(state.address, state.read_api_key()) as client:
        answer = Sampler(state.base_model, client=client).sample('a', {'max_tokens': 2})
        (replica,) = FleetAdministration(client=client).list_replicas()
    assert len(answer.sequences[0].tokens) == 2
    assert replica.address == added.address
    result = CliRunner().invoke(app, ['fleet', 'drain', replica.replica_id, '--state-dir', str(folder)])
    assert result.exit_code == 0
    assert end_process(added.pid, added.start_mark, grace_seconds=20)
    revived = revive_stack(folder, report=_silent)
    assert revived is not None
    assert revived.is_running()
    assert not any(service.is_running() for service in revived.services if service.name == added.name)


@pytest.mark.slow
def test_restarted_gateway_keeps_its_http_address(folder: Path) -> None:
    """A restarted gateway serves HTTP at its previous address."""
    before = _load_state(folder)
    gateway = next(service for service in before.services if service.name == 'gateway')
    os.kill(gateway.pid, signal.SIGKILL)
    assert end_process(gateway.pid, gateway.start_mark, grace_seconds=10)
    after = revive_stack(folder, report=_silent)
    assert after is not None
    assert after.is_running()
    assert read_address(folder / 'run' / 'gateway-http.json') == after.http_address == before.http_address


def _load_state(folder: Path) -> StackState:
    state = StackState.load(folder)
    assert state is not None
    return state


def _silent(service: str, event: str) -> None:
    del service, event
