"""Lists, loads and unloads a tenant's adapter versions in this sampler's memory."""

from twinkle_services.kit.caller import Caller, require_scope
from twinkle_services.kit.paging import Page
from twinkle_services.sampler.application.versions_protocol import Versions
from twinkle_services.sampler.domain.adapter import AdapterChoice
from twinkle_services.sampler.domain.residency import ResidentVersion


class ResidentAdapters:
    """The caller's adapters on this sampler."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions

    async def list_page(self, caller: Caller, page: Page) -> tuple[list[ResidentVersion], tuple[str, int] | None]:
        """Return a page of versions, ordered by adapter and version.

        The second value is the sort key of the last version; None if no further versions follow.
        """
        resident = self._versions.resident(caller.tenant_id)
        if page.after is not None:
            resident = [version for version in resident if _sort_key(version) > page.after]
        items = resident[: page.size]
        return items, _sort_key(items[-1]) if len(resident) > page.size else None

    async def load(self, caller: Caller, choice: AdapterChoice) -> ResidentVersion:
        """Load a version before a request needs it; the version stays in memory until it is evicted.

        Raises:
            ScopeMissing: The caller may not sample.
            NotFound, Unavailable, DataLoss, AdapterMisfit, InvalidField, NotSupportedHere: See `Versions.lease`.
        """
        require_scope(caller, 'sample')
        async with self._versions.lease(caller, choice) as version:
            return version

    async def unload(self, caller: Caller, adapter_id: str) -> None:
        """Unload all versions of an adapter. A version in use is unloaded when its last lease ends.

        Raises:
            AdapterNotFound: The caller has no such adapter on this sampler.
            NotSupportedHere: The sampler serves only one full-parameter run.
        """
        await self._versions.unload(caller, adapter_id)


def _sort_key(version: ResidentVersion) -> tuple[str, int]:
    return version.key.adapter.name, version.key.version
