"""The catalogue's runs of one model service among several."""

from collections.abc import Awaitable, Callable, Collection
from datetime import datetime

import structlog

from services.gateway.catalogue.rules import EntryKey, Run
from services.gateway.catalogue.sql import SqlRunStore
from services.gateway.store.database import Database

_log = structlog.get_logger('catalogue')


class SqlServiceRuns:
    """Keeps what one service tells of. What it does not tell of is gone only where it is of its base models."""

    def __init__(
        self, database: Database, service: str, base_models_of: Callable[[str], Awaitable[Collection[str] | None]]
    ) -> None:
        """Keep runs in `database`; `base_models_of` returns what a service holds, None where nobody knows."""
        self._store = SqlRunStore(database)
        self._service = service
        self._base_models_of = base_models_of

    async def save(self, entry: Run) -> None:
        """Keep the run as it is now."""
        await self._store.save(entry)

    async def mark_gone(self, key: EntryKey, *, moment: datetime) -> None:
        """Mark one run inactive; an unknown one is no error."""
        await self._store.mark_gone(key, moment=moment)

    async def mark_absent_gone(self, present: Collection[EntryKey], *, moment: datetime) -> None:
        """Mark every run of the service's base models inactive whose key is not in `present`."""
        base_models = await self._base_models_of(self._service)
        if base_models is None:
            _log.warning('runs that may be gone stay as they are: the base model is not known', service=self._service)
            return
        await self._store.mark_absent_gone(present, moment=moment, base_models=base_models)
