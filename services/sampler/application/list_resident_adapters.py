"""Which of the caller's adapters are held here."""

from services.kit.caller import Caller
from services.kit.paging import Page
from services.sampler.application.versions import Versions
from services.sampler.domain.residency import ResidentVersion


class ListResidentAdapters:
    """Lists versions by adapter and version."""

    def __init__(self, versions: Versions) -> None:
        """List what `versions` holds."""
        self._versions = versions

    async def __call__(self, caller: Caller, page: Page) -> tuple[list[ResidentVersion], tuple[str, int] | None]:
        """Return a page and the sort key of its last item, or None if it is the last page."""
        held = self._versions.resident(caller.tenant_id)
        if page.after is not None:
            held = [item for item in held if sort_key(item) > page.after]
        items = held[: page.size]
        return items, sort_key(items[-1]) if len(held) > page.size else None


def sort_key(version: ResidentVersion) -> tuple[str, int]:
    """Return what the list is sorted by."""
    return version.key.adapter.name, version.key.version
