"""A killed stack with a damaged file reports the damage at its start or in affected calls, or is not affected."""

import hashlib
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.tinker_sdk import tracebacks
from fixtures.tiny_model import build_tiny_model
from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.administration import KeyAdministration
from twinkle_client.errors import Error
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler
from twinkle_client.stack import StackError, StackOptions, StackState, start_stack, stop_stack

pytestmark = pytest.mark.timeout(1800)
MODEL = 'twinkle/tiny-damage'
FEATURE = {'input_ids': [5, 6, 7, 8], 'labels': [6, 7, 8, -100]}
CHATS = [{'messages': [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': f'a{i}'}]} for i in range(4)]
REASONS = {'ADAPTER_DAMAGED', 'CHECKPOINT_DAMAGED', 'STORED_DATA_DAMAGED', 'PAYLOAD_LOST'}
"""Error reasons by which a call may report damage."""
DERIVED = ('logs/', 'traces/', 'config/', 'run/')
"""Folders without state of the services: logs, traces, generated configurations and addresses."""
_ID = re.compile(r'[0-9a-f]{8,}|\d+')
"""Parts of paths that differ between files of one kind."""


@dataclass(frozen=True)
class _Work:
    """Adapter ids, checkpoint path and API key that were acknowledged before the stack was killed."""

    trained: str
    parked: str
    checkpoint: str
    secret: str


def _silent(service: str, event: str) -> None:
    del service, event


def _options(folder: Path) -> StackOptions:
    return StackOptions(state_dir=folder, base_model=MODEL, engine='torch')


def _work(client: TwinkleClient) -> _Work:
    """Train two adapters, save one of them, and create a key."""
    model = MultiLoraTransformersModel(MODEL, client=client)
    ids = [model.add_adapter_to_model(name, LoraConfig(r=4, seed=1)) for name in ('trained', 'parked')]
    for name in ('trained', 'parked'):
        for _ in range(2):
            model.forward_backward(FEATURE, adapter_name=name)
            model.clip_grad_and_step(adapter_name=name)
    checkpoint = model.save('kept', adapter_name='trained', save_optimizer=True)
    model.forward_backward(FEATURE, adapter_name='trained')
    _, secret = KeyAdministration(client=client).create_key('tenant', scopes=['train', 'sample', 'data'])
    return _Work(trained=ids[0], parked=ids[1], checkpoint=checkpoint, secret=secret)


def _observed(state: StackState, work: _Work) -> dict[str, object]:
    """Return the result of each verb after a start, or the reason of its error."""
    with TwinkleClient(state.address, state.read_api_key()) as client:
        model = MultiLoraTransformersModel(MODEL, client=client)
        sampler = Sampler(MODEL, client=client)

        def forward(adapter_id: str) -> bytes:
            model.attach_adapter(adapter_id, adapter_id)
            return np.asarray(model.forward_only(FEATURE, adapter_name=adapter_id)['logps'][0]).tobytes()

        def load() -> bytes:
            model.add_adapter_to_model('loaded', LoraConfig(r=4, seed=2))
            model.resume_from_checkpoint(work.checkpoint, adapter_name='loaded')
            return np.asarray(model.forward_only(FEATURE, adapter_name='loaded')['logps'][0]).tobytes()

        def sample() -> bytes:
            found = sampler.compute_logprobs([FEATURE['input_ids']], work.checkpoint)
            return np.asarray(found[0]).tobytes()

        def key() -> int:
            with TwinkleClient(state.address, work.secret) as other:
                return len(list(other.list_training_runs()))

        verbs: dict[str, Callable[[], object]] = {
            'forward': lambda: forward(work.trained),
            'forward parked': lambda: forward(work.parked),
            'load': load,
            'sample': sample,
            'key': key,
        }
        return {name: _result_of(verb) for name, verb in verbs.items()}


def _result_of(verb: Callable[[], object]) -> object:
    try:
        return verb()
    except Error as error:
        return error.reason


def _kill(state: StackState) -> None:
    for service in state.services:
        os.kill(service.pid, signal.SIGKILL)


@pytest.fixture(scope='module')
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, _Work, dict[str, object]]]:
    """State folder of a killed stack, its acknowledged work, and the results of verbs after a start without damage."""
    model = build_tiny_model(tmp_path_factory.mktemp('model'), family='qwen3')
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv('TWINKLE_MODEL_ID_ALIASES', f'{MODEL}={model}')
        live, folder = tmp_path_factory.mktemp('live'), tmp_path_factory.mktemp('stack')
        state = start_stack(_options(live), report=_silent)
        with TwinkleClient(state.address, state.read_api_key()) as client:
            work = _work(client)
        _kill(state)
        stop_stack(live, report=_silent)
        shutil.copytree(live, folder, dirs_exist_ok=True)
        yield folder, work, _started(live, work)


def _started(folder: Path, work: _Work) -> dict[str, object]:
    """Start the stack in a folder, and return the results of its verbs."""
    state = start_stack(_options(folder), report=_silent)
    try:
        return _observed(state, work)
    finally:
        stop_stack(folder, report=_silent)


def _started_or_refused(folder: Path, work: _Work) -> dict[str, object] | str:
    try:
        return _started(folder, work)
    except StackError as refusal:
        return str(refusal)


def _state_files(folder: Path) -> list[str]:
    """Return one file of each kind that contains state, as paths in a stack's folder.

    Files are of one kind if their paths differ only in ids and digests.
    """
    paths = sorted(str(path.relative_to(folder)) for path in folder.rglob('*') if path.is_file())
    state = [path for path in paths if not path.startswith(DERIVED) and '/' in path]
    return [*{_ID.sub('*', path): path for path in state}.values()]


def _flip(path: Path, seed: str) -> None:
    content = bytearray(path.read_bytes())
    place = int.from_bytes(hashlib.blake2s(seed.encode()).digest()[:4], 'big') % max(len(content), 1)
    content[place : place + 8] = bytes(value ^ 0xFF for value in content[place : place + 8])
    path.write_bytes(content)


def _check(killed: Any, folder: Path, names: list[str]) -> None:
    """Damage each file, one at a time; check that the start or a verb reports the damage, or that nothing changed."""
    source, work, undamaged = killed
    for name in names:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        _flip(folder / name, name)
        found = _started_or_refused(folder, work)
        if isinstance(found, str):
            assert Path(name).name.removesuffix('-wal') in found, (name, found)
            assert 'Traceback' not in found, name
            continue
        changed = {verb: result for verb, result in found.items() if result != undamaged[verb]}
        assert set(changed.values()) <= REASONS, (name, changed)
        assert tracebacks(folder) == [], name


@pytest.mark.slow
def test_damaged_files_of_a_killed_stack_are_reported(killed: Any, tmp_path: Path) -> None:
    """Damage to a write-ahead log is reported at the start with the database's name, or by a call, or has no effect."""
    names = [name for name in _state_files(killed[0]) if name.endswith('-wal')]
    assert len(names) == 2
    _check(killed, tmp_path / 'stack', names)


@pytest.mark.slow
def test_any_other_damaged_file_of_a_killed_stack_is_reported_or_has_no_effect(killed: Any, tmp_path: Path) -> None:
    """Damage to any kind of file except a write-ahead log is reported at the start or by a call, or has no effect."""
    _check(killed, tmp_path / 'stack', [name for name in _state_files(killed[0]) if not name.endswith('-wal')])
