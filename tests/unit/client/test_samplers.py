"""Tests of the record of samplers that are drained, or whose start is interrupted."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from twinkle_client.errors import NotFoundError, RetryableError
from twinkle_client.stack import ServiceState, StackState, drain_replica, remove_ended
from twinkle_client.stack.process_ids import start_mark

GATEWAY = '127.0.0.1:2'


def test_drained_service_is_marked_and_later_removed(tmp_path: Path) -> None:
    """A drained service is marked as leaving, unless the gateway refuses the drain, and is removed after its exit."""
    exited = _service('sampler', is_alive=False)
    _stack(tmp_path, exited, _service('gateway', address=GATEWAY)).save()
    with pytest.raises(NotFoundError):
        drain_replica(tmp_path, 'unknown', exited.address, drain=_refuse)
    assert _leaving(tmp_path) == []
    drain_replica(tmp_path, 'known', '127.0.0.1:3', drain=print)
    drain_replica(tmp_path / 'missing', 'known', exited.address, drain=print)
    assert _leaving(tmp_path) == []
    remove_ended(tmp_path)
    drain_replica(tmp_path, 'known', exited.address, drain=print)
    assert _leaving(tmp_path) == ['sampler']
    remove_ended(tmp_path)
    assert list(_addresses(tmp_path)) == ['gateway']


@pytest.mark.parametrize(('error', 'leaving'), [(NotFoundError, []), (RetryableError, ['sampler'])])
def test_mark_stays_if_the_gateway_may_have_started_the_drain(
    tmp_path: Path, error: Callable[[str], Exception], leaving: list[str]
) -> None:
    """The mark is removed only if the gateway refused the drain; without it, a draining sampler would be restarted."""
    _stack(tmp_path, _service('sampler'), _service('gateway', address=GATEWAY)).save()

    def fail(replica_id: str) -> None:
        raise error(replica_id)

    with pytest.raises(type(error('known'))):
        drain_replica(tmp_path, 'known', '127.0.0.1:1', drain=fail)
    assert _leaving(tmp_path) == leaving


def test_interrupted_starts_are_completed_or_removed(tmp_path: Path) -> None:
    """A sampler without a recorded address is removed if it has exited; if it is ready, its address is recorded."""
    names = ('sampler', 'sampler-2', 'sampler-3')
    ready, exited, starting = (_service(name, address='', is_alive=name != 'sampler-2') for name in names)
    trainer = _service('model', address='127.0.0.1:3', is_alive=False)
    _stack(tmp_path, trainer, ready, exited, starting, _service('gateway', address=GATEWAY)).save()
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'sampler.json').write_text(json.dumps({'address': '127.0.0.1:4'}))
    remove_ended(tmp_path)
    assert _addresses(tmp_path) == {
        'model': '127.0.0.1:3', 'sampler': '127.0.0.1:4', 'sampler-3': '', 'gateway': GATEWAY,
    }  # fmt: skip


def _refuse(replica_id: str) -> None:
    raise NotFoundError(replica_id)


def _service(name: str, *, address: str = '127.0.0.1:1', is_alive: bool = True) -> ServiceState:
    """Return a service whose process is the current process or has exited."""
    mark = start_mark(os.getpid()) if is_alive else 'gone'
    return ServiceState(name=name, pid=os.getpid(), start_mark=mark, address=address, log_path='')


def _stack(folder: Path, *services: ServiceState) -> StackState:
    return StackState.create(folder, base_model='tiny', services=services)


def _leaving(folder: Path) -> list[str]:
    state = StackState.load(folder)
    return [service.name for service in state.services if service.is_leaving] if state else []


def _addresses(folder: Path) -> dict[str, str]:
    state = StackState.load(folder)
    return {service.name: service.address for service in state.services} if state else {}
