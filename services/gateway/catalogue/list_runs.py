"""The verb that lists runs."""

from services.gateway.catalogue.ports import RunStore
from services.gateway.catalogue.rules import Run, RunFilter
from services.gateway.paging import Cursor, Listing, Page, list_page
from services.kit.caller import Caller


class ListRuns:
    """Lists the caller's runs, newest first."""

    def __init__(self, runs: RunStore) -> None:
        """List what `runs` keeps."""
        self._runs = runs

    async def __call__(self, caller: Caller, page: Page, wanted: RunFilter) -> Listing[Run]:
        """Return one page of those that are `wanted`."""
        found = await self._runs.list_newest(caller.tenant_id, page, wanted)
        return list_page(found, page, cursor_of=lambda run: Cursor(run.create_time, run.run_id))
