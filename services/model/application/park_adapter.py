"""Park an adapter: all of it on disk, none of it in memory, until its next operation.

Its unsaved steps may be saved first, as a checkpoint that outlives the adapter. That takes no number: the client's next
operation is the one that it counts on.
"""

import asyncio
from dataclasses import replace
from weakref import WeakValueDictionary

import structlog

from services.kit.authority import require_internal
from services.kit.caller import Caller
from services.kit.errors import Code, DomainError
from services.kit.failpoints import reach
from services.model.application.directory import AdapterDirectory
from services.model.application.residency import Residency
from services.model.domain.adapter import Adapter
from services.model.domain.engine import AdapterState
from services.model.domain.errors import ReplicaLeased
from services.model.domain.operation import Save
from services.model.ports import Ports

_log = structlog.get_logger('parking')


class ParkAdapter:
    """Parks adapters of sessions that are over. For one event loop."""

    def __init__(self, ports: Ports, directory: AdapterDirectory, residency: Residency) -> None:
        """Use the parts given."""
        self._ports = ports
        self._directory = directory
        self._residency = residency
        self._one_at_a_time: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def __call__(self, caller: Caller, adapter_id: str, *, save_prefix: str = '') -> Adapter:
        """Return the adapter; it is parked then, unless an operation of it runs or it has leased the replica.

        Idempotency: again is harmless, also after a death in the middle of it; what is saved is saved once.

        Args:
            caller: a service of this deployment, acting for the adapter's tenant.
            adapter_id: the adapter.
            save_prefix: what the name of the checkpoint of its unsaved steps begins with; empty: save none.

        Raises:
            ScopeMissing: the call comes from a client.
            AdapterNotFound: no such adapter of the tenant.
            ReplicaLeased: it has to be saved, and another adapter has the replica for itself.
            DomainError: it could not be saved; it stays as it is.
        """
        require_internal(caller)
        adapter = self._directory.get(caller, adapter_id)
        if adapter.is_full_parameter:
            return adapter
        async with self._one_at_a_time.setdefault(adapter_id, asyncio.Lock()):
            if save_prefix and self._directory.get(caller, adapter_id).is_unsaved:
                await self._save(adapter_id, save_prefix)
            await self._residency.park(adapter_id)
        return self._directory.get(caller, adapter_id)

    async def _save(self, adapter_id: str, prefix: str) -> None:
        if self._residency.lease.excludes(adapter_id):
            raise ReplicaLeased()
        taken = await self._state_at_rest(adapter_id)
        if taken is None:
            return
        adapter, state = taken
        reach('park.taken')
        path = await self._keep(adapter, state, prefix)
        reach('park.saved')
        current = self._directory.find(adapter_id)
        if current is None or current.sequence_number != adapter.sequence_number:
            # It went on meanwhile: the checkpoint is there, and no longer all of it.
            return
        await self._ports.journal.amend(replace(current, checkpoint_path=path))
        reach('park.recorded')
        current = self._directory.find(adapter_id)
        if current is not None and current.sequence_number == adapter.sequence_number:
            self._directory.refresh(replace(current, checkpoint_path=path))
        _log.info('saved', adapter=adapter_id, step=adapter.step_count, checkpoint=path)

    async def _state_at_rest(self, adapter_id: str) -> tuple[Adapter, AdapterState] | None:
        """Return an adapter with unsaved steps and its state; None where it is in use, or has none any more."""
        async with self._residency.at_rest(adapter_id) as is_at_rest:
            # Looked up again: making it resident may have found outcomes.
            adapter = self._directory.find(adapter_id)
            if not is_at_rest or adapter is None or not adapter.is_unsaved:
                return None
            return adapter, await self._ports.backend.export_state(adapter_id, is_trainer_included=True)

    async def _keep(self, adapter: Adapter, state: AdapterState, prefix: str) -> str:
        """Save a state under a name that says its step; where that is taken by another, under one of its own."""
        name = f'{prefix}-{adapter.step_count}'
        try:
            return await self._save_as(adapter, state, name)
        except DomainError as error:
            if error.code is not Code.ALREADY_EXISTS:
                raise
            return await self._save_as(adapter, state, f'{name}-{adapter.sequence_number}')

    async def _save_as(self, adapter: Adapter, state: AdapterState, name: str) -> str:
        save = Save(name=name, is_optimizer_included=True)
        # The same for whoever asks again, so that a repeat finds what was saved.
        request_id = f'{adapter.adapter_id}:{adapter.sequence_number}:{name}'
        made = await self._ports.store.save(
            adapter.adapter_id, state, base_model=adapter.base_model, save=save, request_id=request_id
        )
        return made.checkpoint_path
