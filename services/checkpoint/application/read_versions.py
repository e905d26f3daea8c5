"""Get and list versions."""

from services.checkpoint.domain import AdapterKey, AdapterVersion, Catalogue
from services.kit.caller import Caller


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
        self, caller: Caller, adapter_id: str, *, size: int, below: int | None
    ) -> tuple[list[AdapterVersion], int | None]:
        """Return a page, newest first, and what to give as `below` for the next; None after the last.

        Args:
            caller: Whose adapter it is.
            adapter_id: The adapter.
            size: Most versions to return.
            below: Only versions with lower numbers. None: all.

        Raises:
            AdapterNotFound: nothing was ever published.
        """
        ring = self._catalogue.ring(AdapterKey(caller.tenant_id, adapter_id))
        found = [version for version in ring.all_newest_first() if below is None or version.version < below]
        page = found[:size]
        return page, page[-1].version if len(found) > size else None
