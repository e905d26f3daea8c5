"""Recovers adapters at startup, and evicts idle ones periodically."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import structlog

from twinkle_services.kit.errors import BaseModelNotFound, DomainError
from twinkle_services.model.application.create_adapter import CreateAdapter
from twinkle_services.model.application.directory import AdapterDirectory
from twinkle_services.model.application.queues import Queues
from twinkle_services.model.application.residency import Residency
from twinkle_services.model.domain.adapter import Adapter
from twinkle_services.model.domain.errors import OperationCrashed
from twinkle_services.model.domain.journal import JournaledAdapter
from twinkle_services.model.ports import Ports

_log = structlog.get_logger('recovery')


class Recover:
    """Fills the directory from the journal, and recomputes outcomes that were not recorded."""

    def __init__(
        self, ports: Ports, directory: AdapterDirectory, residency: Residency, create_adapter: CreateAdapter
    ) -> None:
        self._ports = ports
        self._directory = directory
        self._residency = residency
        self._create_adapter = create_adapter

    async def __call__(self) -> None:
        """Register all adapters, and restore those with unrecorded outcomes and the one that has the lease.

        The others are restored on demand.

        Raises:
            BaseModelNotFound: An adapter's base model is no longer served, because the configuration changed.
            JournalUnavailable: The disk failed.
        """
        journaled = await self._ports.journal.adapters()
        known = tuple(model.base_model for model in self._ports.backend.facts().base_models)
        for item in journaled:
            if item.adapter.base_model not in known:
                raise BaseModelNotFound(item.adapter.base_model, known)
        for adapter_id, tenant_id in (await self._ports.journal.damaged_adapters()).items():
            _log.error('adapter damaged', adapter=adapter_id)
            self._directory.put_damaged(adapter_id, tenant_id)
        await self.register(journaled)

    async def register(self, journaled: Sequence[JournaledAdapter]) -> None:
        """Register adapters from the journal, and restore those with unrecorded outcomes and the one with the lease."""
        for expired in await self._ports.journal.expired_adapters():
            self._directory.expire(expired)
        self._create_adapter.remember(await self._ports.journal.creations())
        for item in journaled:
            self._directory.put(self._with_lease(item.adapter))
        is_held = self._residency.lease.is_held_by
        unsettled = [item for item in journaled if not item.is_settled or is_held(item.adapter.adapter_id)]
        _log.info('recovery started', adapters=len(journaled), unsettled=len(unsettled))
        for done, item in enumerate(unsettled, start=1):
            if await self._settle(item.adapter.adapter_id):
                _log.info('adapter recovered', adapter=item.adapter.adapter_id, done=done, total=len(unsettled))

    def _with_lease(self, adapter: Adapter) -> Adapter:
        """Renew the lease of an adapter that had it. Return the adapter, without the lease if the renewal fails."""
        if not adapter.has_lease:
            return adapter
        try:
            self._residency.lease.renew(adapter.adapter_id)
        except DomainError as error:
            _log.error('lease not renewed', adapter=adapter.adapter_id, error=str(error))
            return replace(adapter, has_lease=False)
        return adapter

    async def _settle(self, adapter_id: str) -> bool:
        """Restore an adapter, and park it if its last operation crashed the service; return whether this succeeded."""
        try:
            async with self._residency.hold(adapter_id):
                pass
            record = await self._ports.journal.record(adapter_id, size=1)
            errors = [entry.outcome for entry in record if isinstance(entry.outcome, DomainError)]
            if any(error.reason == OperationCrashed.reason for error in errors):
                await self._residency.park(adapter_id)
        except DomainError as error:
            # The adapter's next operation reports the error; other adapters are not affected.
            _log.error('adapter not recovered', adapter=adapter_id, error=str(error))
            return False
        return True


class Cleanup:
    """Evicts idle adapters and queues. Concurrency: use it from one event loop only."""

    def __init__(self, residency: Residency, queues: Queues) -> None:
        self._residency = residency
        self._queues = queues

    async def __call__(self) -> None:
        """Evict the idle adapters, and drop the idle queues."""
        await self._residency.evict_idle()
        self._queues.drop_idle()

    async def repeat(self, interval_seconds: float) -> NoReturn:
        """Run the cleanup periodically, until cancelled."""
        while True:
            await asyncio.sleep(interval_seconds)
            await self()
