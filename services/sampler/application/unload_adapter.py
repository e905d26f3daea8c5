"""Drop an adapter from memory."""

from services.kit.caller import Caller
from services.sampler.application.versions import Versions


class UnloadAdapter:
    """Drops all versions of an adapter; those in use leave once nothing uses them."""

    def __init__(self, versions: Versions) -> None:
        """Unload from `versions`."""
        self._versions = versions

    async def __call__(self, caller: Caller, adapter_id: str) -> None:
        """Drop it.

        Raises:
            AdapterNotFound: nothing of it is here for this caller.
        """
        await self._versions.unload(caller, adapter_id)
