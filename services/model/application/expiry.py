"""Removes adapters that are unused for a long time after their sessions end, and first saves them as checkpoints.

A checkpoint belongs to the adapter's tenant and counts towards the storage quota. A full quota does not prevent the
save, because losing work would be worse. Full-parameter adapters are never removed, because they are never saved
automatically.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import NoReturn

import structlog

from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.failpoints import reach
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.model.application.delete_adapter import DeleteAdapter
from twinkle_services.model.application.directory import AdapterDirectory
from twinkle_services.model.application.park_after_session import ParkAdapter
from twinkle_services.model.application.residency import Residency
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.errors import AdapterDamaged
from twinkle_services.model.ports import Ports

SAVE_PREFIX = 'adapter-expired'
"""Prefix of the names of the checkpoints."""
_log = structlog.get_logger('expiry')


class AdapterExpiry:
    """Saves and removes unused adapters, one at a time.

    A sweep that fails or is interrupted by a crash loses nothing, and the next one completes it: an adapter is removed
    only after its trained state has been found in an undamaged checkpoint.

    Concurrency: use it from one event loop only.
    """

    def __init__(
        self,
        ports: Ports,
        directory: AdapterDirectory,
        residency: Residency,
        park: ParkAdapter,
        delete: DeleteAdapter,
        *,
        unused_for: timedelta | None,
    ) -> None:
        """Create the sweep. Adapters expire after `unused_for` without use; None keeps all adapters."""
        self._ports = ports
        self._directory = directory
        self._residency = residency
        self._park = park
        self._delete = delete
        self._unused_for = unused_for
        self._failed: set[str] = set()
        """Adapters whose last removal failed, so that the failure is logged once."""

    async def __call__(self) -> int:
        """Remove all expired adapters that can be removed now, and return their number."""
        expired = [adapter.adapter_id for adapter in self._directory.all() if self._is_expired(adapter)]
        self._failed.intersection_update(expired)
        count = 0
        for adapter_id in expired:
            crashed = AdapterDamaged(adapter_id, 'the service crashed each time it removed the unused adapter')
            try:
                async with self._residency.attempts.counted(f'removals of {adapter_id}', refusal=crashed):
                    count += await self._remove(adapter_id)
            except DomainError as error:
                write = _log.debug if adapter_id in self._failed else _log.warning
                write('unused adapter kept', adapter=adapter_id, reason=error.reason, error=str(error))
                self._failed.add(adapter_id)
        return count

    async def repeat(
        self, interval: timedelta, *, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> NoReturn:
        """Remove expired adapters now and after each `interval`, until cancelled."""
        while True:
            await self()
            await pause(interval.total_seconds())

    def _is_expired(self, adapter: Adapter) -> bool:
        if self._unused_for is None or adapter.is_full_parameter or adapter.last_use_time is None:
            return False
        return adapter.last_use_time < self._ports.clock.now() - self._unused_for

    async def _remove(self, adapter_id: str) -> bool:
        """Save and remove an adapter; return False if it was used or deleted since the sweep began.

        Raises:
            DomainError: The adapter could not be saved or removed.
        """
        if self._find_expired(adapter_id) is not None:
            await self._restore_if_unsettled(adapter_id)
        adapter = self._find_expired(adapter_id)
        if adapter is None:
            return False
        with acting_for(Caller(tenant_id=adapter.tenant_id, is_internal=True)):
            if not await self._is_saved(adapter):
                await self._park.save(adapter_id, prefix=SAVE_PREFIX)
                adapter = self._find_expired(adapter_id)
                if adapter is None or not await self._is_saved(adapter):
                    return False
            reach('expiry.saved')
            is_removed = await self._delete.expire(adapter)
        reach('expiry.removed')
        if is_removed:
            _log.info('unused adapter removed', adapter=adapter_id, checkpoint=adapter.checkpoint_path)
        return is_removed

    def _find_expired(self, adapter_id: str) -> Adapter | None:
        """Return an adapter if it still exists and is expired."""
        adapter = self._directory.find(adapter_id)
        return adapter if adapter is not None and self._is_expired(adapter) else None

    async def _restore_if_unsettled(self, adapter_id: str) -> None:
        """Restore an adapter whose last operation has no recorded outcome; that operation may have trained it."""
        record = await self._ports.journal.record(adapter_id, size=1)
        if record and record[-1].outcome is None:
            async with self._residency.hold(adapter_id):
                pass

    async def _is_saved(self, adapter: Adapter) -> bool:
        """Return whether the adapter was never trained, or a lasting, undamaged checkpoint contains its state."""
        if not adapter.step_count:
            return True
        return bool(adapter.checkpoint_path) and await self._ports.store.has_lasting_checkpoint(adapter.checkpoint_path)
