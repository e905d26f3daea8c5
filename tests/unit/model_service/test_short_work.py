"""Creating, parking and deleting adapters, and their steps, wait for no more than the running pass."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fixtures.fake_trainer import FakeTrainer
from fixtures.model_verbs import ALICE, FakePorts, create_request, execute, let_others_run, training
from twinkle_services.kit.caller import Caller
from twinkle_services.model.application.service import ModelService
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.operation import Save, Step


class SequentialTrainer(FakeTrainer):
    """A trainer that runs one call at a time, in order of arrival, like the thread of a real engine."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        """Adapters of the calls, in the order in which they ran."""
        self._lock = asyncio.Lock()

    def __getattribute__(self, name: str) -> Any:
        """Return a method that waits for its turn if the method belongs to the port."""
        method = super().__getattribute__(name)
        if name not in {
            'create_adapter',
            'delete_adapter',
            'snapshot',
            'export_state',
            'import_state',
            'run',
            'run_pass',
        }:
            return method

        async def in_turn(*args: Any, **options: Any) -> Any:
            if self._lock.locked() and self._holder is asyncio.current_task():
                return await method(*args, **options)
            async with self._lock:
                self._holder = asyncio.current_task()
                # Other tasks run while the engine computes.
                await let_others_run()
                result = await method(*args, **options)
                is_pass = isinstance(args[0], list)
                self.calls.extend([part.adapter_id for part in args[0]] if is_pass else args[:1])
                return result

        return in_turn

    _holder: asyncio.Task[Any] | None = None


async def _create(verbs: ModelService, adapter: Adapter) -> None:
    path = f'twinkle://{adapter.adapter_id}/weights/saved'
    await verbs.create_adapter(ALICE, create_request('new', checkpoint_path=path, is_optimizer_included=True))


async def _park(verbs: ModelService, adapter: Adapter) -> None:
    caller = Caller(tenant_id=adapter.tenant_id, is_internal=True)
    await verbs.park_adapter(caller, adapter.adapter_id, save_prefix='session-expired')


async def _delete(verbs: ModelService, adapter: Adapter) -> None:
    await verbs.delete_adapter(ALICE, adapter.adapter_id)


async def _step(verbs: ModelService, adapter: Adapter) -> None:
    await execute(verbs, adapter, 4, Step())


@pytest.mark.parametrize('work', [_create, _park, _delete, _step])
async def test_short_work_waits_for_one_pass(work: Callable[[ModelService, Adapter], Awaitable[None]]) -> None:
    """All engine calls of short work run after the running pass and before the next pass."""
    trainer = SequentialTrainer()
    ports = FakePorts(trainer=trainer)
    verbs = ports.verbs()
    adapter, first, second = [await verbs.create_adapter(ALICE, create_request(name)) for name in ('a', 'b', 'c')]
    await execute(verbs, adapter, 1, training())
    await execute(verbs, adapter, 2, Save(name='saved', is_optimizer_included=True))
    await execute(verbs, adapter, 3, Step())
    trainer.gate.clear()
    passes = [asyncio.ensure_future(execute(verbs, first, 1, training()))]
    await let_others_run()
    passes.append(asyncio.ensure_future(execute(verbs, second, 1, training())))
    begin = len(trainer.calls)
    running = asyncio.ensure_future(work(verbs, adapter))
    await let_others_run()
    trainer.gate.set()
    await running
    await asyncio.gather(*passes)
    calls = trainer.calls[begin:]
    assert len(calls) > 2
    assert (calls[0], calls[-1]) == (first.adapter_id, second.adapter_id)
    assert {first.adapter_id, second.adapter_id}.isdisjoint(calls[1:-1])
    await verbs.close()
