"""Parks adapters whose session or lease ends: stores their state on disk and frees their memory.

Unsaved steps can be saved first, as a checkpoint that remains when the adapter is deleted. Saving uses no sequence
number, so the client's next number stays the same.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakValueDictionary

import structlog

from twinkle_services.kit.caller import Caller, require_internal, require_scope
from twinkle_services.kit.errors import BaseModelNotFound, Code, DomainError
from twinkle_services.kit.failpoints import reach
from twinkle_services.model.application.directory import AdapterDirectory
from twinkle_services.model.application.residency import Residency
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.engine import AdapterState
from twinkle_services.model.domain.operation import Save
from twinkle_services.model.ports import Ports, TrainerBackend

_log = structlog.get_logger('parking')


class ParkAdapter:
    """Parks the adapters of finished sessions. Concurrency: use it from one event loop only."""

    def __init__(
        self,
        ports: Ports,
        directory: AdapterDirectory,
        residency: Residency,
        *,
        drop_operations: Callable[[str], None],
    ) -> None:
        """Create the use case; `drop_operations` cancels an adapter's operations, except one in its last pass."""
        self._drop_operations = drop_operations
        self._ports = ports
        self._directory = directory
        self._residency = residency
        self._adapter_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def __call__(self, caller: Caller, adapter_id: str, *, save_prefix: str = '') -> Adapter:
        """Cancel an adapter's waiting operations, and park it unless an operation is running; return the adapter.

        A full-parameter adapter is parked after its running operation, and is not saved as a checkpoint.

        Idempotency: the call can be repeated, even after a crash; the checkpoint is saved only once.

        Args:
            caller: A service of this deployment, acting for the adapter's tenant.
            adapter_id: Id of the adapter.
            save_prefix: Prefix of the name of the checkpoint with the unsaved steps; empty to save no checkpoint.

        Raises:
            ScopeMissing: The caller is a client.
            AdapterNotFound, AdapterExpired, AdapterDamaged: See `AdapterDirectory.get`.
            ReplicaLeased: The adapter has unsaved steps, and another adapter uses the replica exclusively.
            DomainError: Saving or recording failed. The waiting operations were cancelled; repeat the call.
        """
        require_internal(caller)
        self._directory.get(caller, adapter_id)
        async with self._adapter_locks.setdefault(adapter_id, asyncio.Lock()):
            self._drop_operations(adapter_id)
            adapter = self._directory.get(caller, adapter_id)
            if save_prefix and adapter.is_unsaved and not adapter.is_full_parameter:
                await self._save(adapter_id, save_prefix)
            await self._residency.end_lease(adapter_id)
            await self._residency.park(adapter_id)
            now = self._ports.clock.now()
            await self._record(adapter_id, lambda adapter: replace(adapter, session_end_time=now))
        return self._directory.get(caller, adapter_id)

    async def save(self, adapter_id: str, *, prefix: str) -> None:
        """Save an adapter whose newest state is in no usable checkpoint, and park it; do nothing if it is in use.

        Args:
            adapter_id: Id of the adapter; its checkpoint on record, if any, is known to be unusable.
            prefix: Prefix of the name of the new checkpoint.

        Raises:
            DomainError: Saving failed; the adapter is unchanged.
        """
        async with self._adapter_locks.setdefault(adapter_id, asyncio.Lock()):
            known = self._directory.find(adapter_id)
            await self._save(adapter_id, prefix, lost_path=known.checkpoint_path if known else '')
            await self._residency.park(adapter_id)

    async def _record(self, adapter_id: str, change: Callable[[Adapter], Adapter]) -> None:
        """Change an adapter durably; discard the change if an operation runs in the meantime."""
        before = self._directory.find(adapter_id)
        if before is None:
            return
        await self._ports.journal.amend(change(before))
        current = self._directory.find(adapter_id)
        if current is not None and current.sequence_number == before.sequence_number:
            self._directory.refresh(change(current))

    async def _save(self, adapter_id: str, prefix: str, *, lost_path: str = '') -> None:
        """Save an adapter that has unsaved steps, or whose only checkpoint is `lost_path`, which cannot be used."""
        exported = await self._state_at_rest(adapter_id, lost_path)
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
        await self._record(adapter_id, lambda adapter: replace(adapter, checkpoint_path=path))
        reach('park.recorded')
        _log.info('unsaved steps saved', adapter=adapter_id, step=adapter.step_count, checkpoint=path)

    async def _state_at_rest(self, adapter_id: str, lost_path: str) -> tuple[Adapter, AdapterState] | None:
        """Return an adapter and its state; None if the adapter is in use, was deleted, or need not be saved."""
        async with self._residency.at_rest(adapter_id) as is_at_rest:
            # Loading the adapter may have recorded outcomes, which changed it.
            adapter = self._directory.find(adapter_id)
            if not is_at_rest or adapter is None:
                return None
            is_lost = bool(lost_path) and adapter.checkpoint_path == lost_path
            if not adapter.is_unsaved and not is_lost:
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


class EndLease:
    """Ends the lease of the replica. Concurrency: use it from one event loop only."""

    def __init__(self, backend: TrainerBackend, residency: Residency, *, suspended_seconds: float) -> None:
        """Create the use case; operations of the adapter are refused for `suspended_seconds` after its lease ends."""
        self._backend = backend
        self._residency = residency
        self._suspended_seconds = suspended_seconds

    async def __call__(self, caller: Caller, base_model: str) -> str | None:
        """Park the adapter that has the lease, after its running operation, and refuse its operations temporarily.

        Returns:
            Id of the adapter; None if no adapter had the lease.

        Raises:
            ScopeMissing: The caller is not an operator.
            BaseModelNotFound: This replica does not serve the base model.
            JournalUnavailable: The end of the lease could not be recorded.
        """
        require_scope(caller, 'operator')
        known = tuple(model.base_model for model in self._backend.facts().base_models)
        if base_model not in known:
            raise BaseModelNotFound(base_model, known)
        holder_id = self._residency.lease.holder_id
        if holder_id is not None:
            await self._residency.end_lease(holder_id, suspended_seconds=self._suspended_seconds)
        return holder_id
