"""Parks an adapter: stores its state on disk and frees its memory until the next operation.

Unsaved steps can be saved first, as a checkpoint that remains when the adapter is deleted. Saving uses no sequence
number, so the client's next number stays the same.
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
    """Parks the adapters of finished sessions. Concurrency: use it from one event loop only."""

    def __init__(self, ports: Ports, directory: AdapterDirectory, residency: Residency) -> None:
        self._ports = ports
        self._directory = directory
        self._residency = residency
        self._adapter_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def __call__(self, caller: Caller, adapter_id: str, *, save_prefix: str = '') -> Adapter:
        """Park an adapter, unless one of its operations is running or it has leased the replica; return the adapter.

        Idempotency: the call can be repeated, even after a crash; the checkpoint is saved only once.

        Args:
            caller: A service of this deployment, acting for the adapter's tenant.
            adapter_id: Id of the adapter.
            save_prefix: Prefix of the name of the checkpoint with the unsaved steps; empty to save no checkpoint.

        Raises:
            ScopeMissing: The caller is a client.
            AdapterNotFound: The tenant has no such adapter.
            ReplicaLeased: The adapter has unsaved steps, and another adapter uses the replica exclusively.
            DomainError: Saving failed; the adapter is unchanged.
        """
        require_internal(caller)
        adapter = self._directory.get(caller, adapter_id)
        if adapter.is_full_parameter:
            return adapter
        async with self._adapter_locks.setdefault(adapter_id, asyncio.Lock()):
            if save_prefix and self._directory.get(caller, adapter_id).is_unsaved:
                await self._save(adapter_id, save_prefix)
            await self._residency.park(adapter_id)
        return self._directory.get(caller, adapter_id)

    async def _save(self, adapter_id: str, prefix: str) -> None:
        if self._residency.lease.excludes(adapter_id):
            raise ReplicaLeased()
        exported = await self._state_at_rest(adapter_id)
        if exported is None:
            return
        adapter, state = exported
        reach('park.taken')
        path = await self._save_checkpoint(adapter, state, prefix)
        reach('park.saved')
        current = self._directory.find(adapter_id)
        if current is None or current.sequence_number != adapter.sequence_number:
            # The adapter ran further operations during the save, so the checkpoint is not its newest state.
            return
        await self._ports.journal.amend(replace(current, checkpoint_path=path))
        reach('park.recorded')
        current = self._directory.find(adapter_id)
        if current is not None and current.sequence_number == adapter.sequence_number:
            self._directory.refresh(replace(current, checkpoint_path=path))
        _log.info('unsaved steps saved', adapter=adapter_id, step=adapter.step_count, checkpoint=path)

    async def _state_at_rest(self, adapter_id: str) -> tuple[Adapter, AdapterState] | None:
        """Return an adapter with unsaved steps and its state; None if it is in use or has no unsaved steps."""
        async with self._residency.at_rest(adapter_id) as is_at_rest:
            # Look the adapter up again: loading it may have recorded outcomes.
            adapter = self._directory.find(adapter_id)
            if not is_at_rest or adapter is None or not adapter.is_unsaved:
                return None
            return adapter, await self._ports.backend.export_state(adapter_id, is_trainer_included=True)

    async def _save_checkpoint(self, adapter: Adapter, state: AdapterState, prefix: str) -> str:
        """Save a state under a name with its step count; if that name is taken, append the sequence number."""
        name = f'{prefix}-{adapter.step_count}'
        try:
            return await self._save_as(adapter, state, name)
        except DomainError as error:
            if error.code is not Code.ALREADY_EXISTS:
                raise
            return await self._save_as(adapter, state, f'{name}-{adapter.sequence_number}')

    async def _save_as(self, adapter: Adapter, state: AdapterState, name: str) -> str:
        save = Save(name=name, is_optimizer_included=True)
        # Repeated calls use the same request id, so that a repeat finds the saved checkpoint.
        request_id = f'{adapter.adapter_id}:{adapter.sequence_number}:{name}'
        saved = await self._ports.store.save(
            adapter.adapter_id, state, base_model=adapter.base_model, save=save, request_id=request_id
        )
        return saved.checkpoint_path
