"""The verb that shows an export."""

from services.gateway.errors import ExportNotFound
from services.gateway.exports.ports import ExportStore
from services.gateway.exports.rules import Export
from services.kit.caller import Caller


class GetExport:
    """Shows an export, also one that is over."""

    def __init__(self, store: ExportStore) -> None:
        """Show what `store` keeps."""
        self._store = store

    async def __call__(self, caller: Caller, export_id: str) -> Export:
        """Return the export.

        Raises:
            ExportNotFound: the caller has none of that id.
        """
        export = await self._store.get(caller.tenant_id, export_id)
        if export is None:
            raise ExportNotFound(export_id)
        return export
