"""An operation that kills the model service whenever it runs is refused, and all others are served."""

from pathlib import Path
from typing import Any

import pytest

from fixtures.checkpoint_service import failure_of
from fixtures.faulty_service import Kill
from fixtures.killed_model import PersistentClient, killed_model
from twinkle.api.model.v1 import operation_pb2
from twinkle_services.model.application.attempts import MAX_ATTEMPTS
from twinkle_services.model.application.restore import MAX_RESTORES

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

POISON = 3
"""Number of the operation during which the process is killed, first when it runs and then in each replay."""
KILLS = [
    # The fifth operation of the program below is computed and durable, but its outcome is not.
    Kill(failpoint='operation.answered', count=5),
    Kill(failpoint='restore.replaying', count=POISON),
    Kill(failpoint='restore.replaying', count=POISON),
]


async def _check(client: PersistentClient) -> None:
    culprit, innocent = await client.create('culprit'), await client.create('innocent')
    await client.train(culprit, 1, seed=1)
    await client.step(culprit, 2)
    found = await client.train_and_step(innocent, range(1, 3))
    assert (await failure_of(client.train(culprit, POISON, seed=7))).reason == 'OPERATION_CRASHED'
    found += await client.train_and_step(innocent, range(3, 5))
    resumed = [await client.train(culprit, 4, seed=9), await client.step(culprit, 5)]

    reference = await client.create('undisturbed')
    assert await client.train_and_step(reference, range(1, 5)) == found
    reference = await client.create('without the operation')
    await client.train_and_step(reference, range(1, 3))
    assert resumed == [await client.train(reference, 3, seed=9), await client.step(reference, 4)]


@pytest.mark.parametrize('on_mesh', [False, True], ids=['one process', 'mesh'])
async def test_operation_killed_in_each_replay_fails(tiny_llama_dir: Path, tmp_path: Path, *, on_mesh: bool) -> None:
    """An operation fails after two kills during its replay; later results equal those of runs without it."""
    async with killed_model(tiny_llama_dir, tmp_path, KILLS, on_mesh=on_mesh) as (service, channel):
        await _check(PersistentClient(channel, str(tiny_llama_dir)))
        assert [(kill.failpoint, kill.count) for kill in service.deaths] == [
            (kill.failpoint, kill.count) for kill in KILLS
        ]


ATTEMPT_KILLS = [
    # Two creations and a save are counted before the work during which the process is killed.
    Kill(failpoint='attempt.counted', count=4),
    *[Kill(failpoint='attempt.counted')] * (MAX_ATTEMPTS - 1),
]
STATE_VERBS: dict[str, Any] = {
    'save': {'save': operation_pb2.Save(name='poison')},
    'publish': {'publish_version': operation_pb2.PublishVersion()},
    'load': {},
}
"""Verbs that call the checkpoint service. `load` reads the checkpoint that the program saves."""


async def _prepare(culprit: PersistentClient, innocent: PersistentClient) -> tuple[str, str, str, list[Any]]:
    """Create and train an adapter of each client, and save the adapter of `culprit`.

    Returns:
        The ids of both adapters, the path of the checkpoint, and the results of the second adapter.
    """
    first, second = await culprit.create('culprit'), await innocent.create('innocent')
    await culprit.train_and_step(first, range(1, 3))
    results = await innocent.train_and_step(second, range(1, 3))
    saved = await culprit.execute(first, 3, save=operation_pb2.Save(name='start'))
    return first, second, saved.save.checkpoint_path, results


async def _check_innocent(client: PersistentClient, adapter_id: str, results: list[Any]) -> None:
    """Continue training the adapter that causes no kill, and compare all its results with a run without kills."""
    results += await client.train_and_step(adapter_id, range(3, 7))
    reference = await client.create('undisturbed')
    assert await client.train_and_step(reference, range(1, 7)) == results


@pytest.mark.parametrize('name', STATE_VERBS)
async def test_state_verb_killed_in_each_attempt_fails(tiny_llama_dir: Path, tmp_path: Path, name: str) -> None:
    """A verb that calls the checkpoint service is refused after three kills; its adapter and other tenants continue."""
    async with killed_model(tiny_llama_dir, tmp_path, ATTEMPT_KILLS) as (service, channel):
        clients = [PersistentClient(channel, str(tiny_llama_dir), tenant=tenant) for tenant in ('mallory', 'alice')]
        culprit, innocent, path, results = await _prepare(*clients)
        verb = STATE_VERBS[name] or {'load': operation_pb2.Load(checkpoint_path=path)}
        for _ in range(2):
            assert (await failure_of(clients[0].execute(culprit, 4, **verb))).reason == 'OPERATION_CRASHED'
        assert service.deaths == ATTEMPT_KILLS
        await _check_innocent(clients[1], innocent, results)
        await clients[0].train_and_step(culprit, range(5, 7))
        # A client that repeats the verb soon after the last crash could crash the service again.
        assert (await failure_of(clients[0].execute(culprit, 7, **verb))).reason == 'OPERATION_CRASHED'
        assert service.deaths == ATTEMPT_KILLS


async def test_creation_killed_in_each_attempt_fails(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """A creation fails after three kills; other creations succeed, and another tenant's results are bitwise equal."""
    async with killed_model(tiny_llama_dir, tmp_path, ATTEMPT_KILLS) as (service, channel):
        clients = [PersistentClient(channel, str(tiny_llama_dir), tenant=tenant) for tenant in ('mallory', 'alice')]
        culprit, innocent, _, results = await _prepare(*clients)
        assert (await failure_of(clients[0].create('poison'))).reason == 'REQUEST_CRASHED'
        assert service.deaths == ATTEMPT_KILLS
        await _check_innocent(clients[1], innocent, results)
        await clients[0].train(culprit, 4, seed=9)
        await clients[0].step(culprit, 5)
        await clients[0].create('harmless')


RESTORE_KILLS = [
    # The outcome of the fifth operation of the program below is missing, so each later start restores its adapter.
    Kill(failpoint='operation.answered', count=5),
    *[Kill(failpoint='restore.begun')] * MAX_RESTORES,
]


async def test_adapter_whose_restores_are_killed_is_damaged(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """The service starts after five kills during restores of an adapter, and reports only this adapter as damaged."""
    async with killed_model(tiny_llama_dir, tmp_path, RESTORE_KILLS) as (service, channel):
        clients = [PersistentClient(channel, str(tiny_llama_dir), tenant=tenant) for tenant in ('mallory', 'alice')]
        culprit, innocent = await clients[0].create('culprit'), await clients[1].create('innocent')
        await clients[0].train_and_step(culprit, range(1, 3))
        results = await clients[1].train_and_step(innocent, range(1, 3))
        for _ in range(2):
            assert (await failure_of(clients[0].train(culprit, POISON, seed=7))).reason == 'ADAPTER_DAMAGED'
        assert service.deaths == RESTORE_KILLS
        await _check_innocent(clients[1], innocent, results)
        await clients[0].create('harmless')
