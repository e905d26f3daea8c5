"""The verb that lists exports."""

from services.gateway.exports.ports import ExportStore
from services.gateway.exports.rules import Export
from services.gateway.paging import Cursor, Listing, Page, list_page
from services.kit.caller import Caller


class ListExports:
    """Lists a caller's exports, newest first."""

    def __init__(self, store: ExportStore) -> None:
        """List what `store` keeps."""
        self._store = store

    async def __call__(self, caller: Caller, page: Page, *, checkpoint_path: str | None) -> Listing[Export]:
        """Return one page, of one checkpoint alone unless it is None."""
        found = await self._store.list_newest(caller.tenant_id, page, checkpoint_path=checkpoint_path)
        return list_page(found, page, cursor_of=lambda item: Cursor(item.create_time, item.export_id))
