"""The verb that ends an export."""

from services.gateway.errors import ExportNotFound
from services.gateway.exports.export_news import ExportNews
from services.gateway.exports.ports import ExportStore
from services.gateway.exports.rules import Export
from services.kit.caller import Caller
from services.kit.clock import Clock


class CancelExport:
    """Ends an export; whoever carries it out stops, at this gateway at once."""

    def __init__(self, store: ExportStore, *, news: ExportNews, clock: Clock) -> None:
        """Cancel what `store` keeps, and say so by `news`."""
        self._store = store
        self._news = news
        self._clock = clock

    async def __call__(self, caller: Caller, export_id: str) -> Export:
        """Return the export, which is cancelled now unless it was over.

        Raises:
            ExportNotFound: the caller has none of that id.
        """
        export = await self._store.cancel(caller.tenant_id, export_id, now=self._clock.now())
        if export is None:
            raise ExportNotFound(export_id)
        self._news.tell()
        return export
