"""Operations on runs, and code that the operations on their metrics and rollouts share."""

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from twinkle_services.gateway.catalogue.rules import Run, RunFilter
from twinkle_services.gateway.catalogue.sql import SqlRunStore
from twinkle_services.gateway.errors import RunNotFound
from twinkle_services.gateway.paging import Listing, Page
from twinkle_services.kit.caller import Caller

_CREATION_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses in seconds between attempts to find a run, because the gateway learns of a new run after its creation."""


class Runs:
    """Reads a caller's runs as last reported, even while their model services are unreachable."""

    def __init__(self, store: SqlRunStore) -> None:
        self._store = store

    async def get(self, caller: Caller, run_id: str) -> Run:
        """Return a run.

        Raises:
            RunNotFound: the caller has no such run.
        """
        run = await self._store.get(caller.tenant_id, run_id)
        if run is None:
            raise RunNotFound(run_id)
        return run

    async def list(self, caller: Caller, page: Page, wanted: RunFilter) -> Listing[Run]:
        """Return one page of the caller's runs that match `wanted`, newest first."""
        return await self._store.list_newest(caller.tenant_id, page, wanted)


class TenantTurns:
    """Lets each tenant read or store the content of one run at a time; a call may take 100 MB of memory and one second.

    Concurrency: calls of one tenant run in the order of arrival. Calls of different tenants do not wait for each other.
    """

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, tenant_id: str) -> asyncio.Lock:
        """Return the lock that a call of the tenant holds while it runs."""
        return self._locks.setdefault(tenant_id, asyncio.Lock())


async def find_new_run(runs: Runs, caller: Caller, run_id: str, *, pause: Callable[[float], Awaitable[None]]) -> Run:
    """Return a run; wait up to about two seconds for a new run to appear. `pause` sleeps for a number of seconds.

    Raises:
        RunNotFound: the caller has no such run.
    """
    for seconds in _CREATION_PAUSES:
        try:
            return await runs.get(caller, run_id)
        except RunNotFound:
            await pause(seconds)
    return await runs.get(caller, run_id)
