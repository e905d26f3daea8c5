"""Operations on runs."""

from services.gateway.catalogue.ports import RunStore
from services.gateway.catalogue.rules import Run, RunFilter
from services.gateway.errors import RunNotFound
from services.gateway.paging import Cursor, Listing, Page, list_page
from services.kit.caller import Caller


class Runs:
    """Reads a caller's runs as last reported, even while their model services are unreachable."""

    def __init__(self, store: RunStore) -> None:
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
        found = await self._store.list_newest(caller.tenant_id, page, wanted)
        return list_page(found, page, cursor_of=lambda run: Cursor(run.create_time, run.run_id))
