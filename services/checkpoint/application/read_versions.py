"""Get and list versions."""

from services.checkpoint.domain import AdapterKey, AdapterVersion, Catalogue
from services.kit.caller import Caller
from services.kit.paging import Page, SortKey


class GetVersion:
    """Finds one version."""

    def __init__(self, catalogue: Catalogue) -> None:
        """Use the catalogue."""
        self._catalogue = catalogue

    async def __call__(self, caller: Caller, adapter_id: str, version: int) -> AdapterVersion:
        """Return a version; 0 is the newest.

        Raises:
            AdapterNotFound, VersionNotFound: it is not here.
        """
        return self._catalogue.ring(AdapterKey(caller.tenant_id, adapter_id)).get(version)


class ListVersions:
    """Lists an adapter's versions."""

    def __init__(self, catalogue: Catalogue) -> None:
        """Use the catalogue."""
        self._catalogue = catalogue

    async def __call__(
        self, caller: Caller, adapter_id: str, page: Page
    ) -> tuple[list[AdapterVersion], SortKey | None]:
        """Return a page, newest first, and the sort key of its last version if more follow.

        Raises:
            AdapterNotFound: nothing was ever published.
        """
        ring = self._catalogue.ring(AdapterKey(caller.tenant_id, adapter_id))
        found = [item for item in ring.all_newest_first() if page.after is None or (item.version,) < page.after]
        items = found[: page.size]
        return items, (items[-1].version,) if len(found) > page.size else None
