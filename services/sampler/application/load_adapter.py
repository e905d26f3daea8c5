"""Bring an adapter here before it is needed."""

from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.sampler.application.versions import Versions
from services.sampler.domain.adapter import AdapterChoice
from services.sampler.domain.residency import ResidentVersion


class LoadAdapter:
    """Waits until a version is here and lets it go again; it stays while there is room."""

    def __init__(self, versions: Versions) -> None:
        """Load into `versions`."""
        self._versions = versions

    async def __call__(self, caller: Caller, choice: AdapterChoice) -> ResidentVersion:
        """Return the version that is resident now.

        Raises:
            ScopeMissing: the caller may not sample.
            NotFound, VersionNotReady, AdapterMisfit, InvalidField: as `Versions.lease`.
        """
        require_scope(caller, 'sample')
        async with self._versions.lease(caller, choice) as version:
            return version
