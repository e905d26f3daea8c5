"""Take up where the last process ended: before the service says that it serves."""

import asyncio
from typing import NoReturn

import structlog

from services.kit.errors import BaseModelNotFound, DomainError
from services.model.application.create_adapter import CreateAdapter
from services.model.application.directory import AdapterDirectory
from services.model.application.queues import Queues
from services.model.application.residency import Residency
from services.model.ports import JournaledAdapter, Ports

_log = structlog.get_logger('recovery')


class Recover:
    """Fills the directory from the journal, and finds the outcomes that were never noted."""

    def __init__(
        self, ports: Ports, directory: AdapterDirectory, residency: Residency, create_adapter: CreateAdapter
    ) -> None:
        """Use the parts given."""
        self._ports = ports
        self._directory = directory
        self._residency = residency
        self._create_adapter = create_adapter

    async def __call__(self) -> None:
        """Make every adapter known again; those in the middle of something are made whole, the others when asked for.

        Raises:
            BaseModelNotFound: an adapter is of a base model that is not served: the configuration was changed.
        """
        kept = await self._ports.journal.adapters()
        known = tuple(model.base_model for model in self._ports.backend.facts().base_models)
        for item in kept:
            if item.adapter.base_model not in known:
                raise BaseModelNotFound(item.adapter.base_model, known)
            self._directory.put(item.adapter)
            if item.adapter.is_full_parameter:
                self._residency.lease.take(item.adapter.adapter_id)
        self._create_adapter.remember(await self._ports.journal.creations())
        unsettled = [item for item in kept if not item.is_settled]
        _log.info('recovering', adapters=len(kept), unsettled=len(unsettled))
        for place, item in enumerate(unsettled, start=1):
            await self._settle(item)
            _log.info('recovered', adapter=item.adapter.adapter_id, done=place, total=len(unsettled))

    async def _settle(self, item: JournaledAdapter) -> None:
        try:
            async with self._residency.hold(item.adapter.adapter_id):
                pass
        except DomainError as error:
            # Its own operations will say so; the others are served.
            _log.error('not recovered', adapter=item.adapter.adapter_id, error=str(error))


class Upkeep:
    """Lets go of what nobody asks for. For one event loop."""

    def __init__(self, residency: Residency, queues: Queues) -> None:
        """Use the parts given."""
        self._residency = residency
        self._queues = queues

    async def __call__(self) -> None:
        """Do it once."""
        await self._residency.evict_idle()
        self._queues.drop_idle()

    async def repeat(self, interval_seconds: float) -> NoReturn:
        """Do it again and again, until cancelled."""
        while True:
            await asyncio.sleep(interval_seconds)
            await self()
