"""The verb that shows a run."""

from services.gateway.catalogue.ports import RunStore
from services.gateway.catalogue.rules import Run
from services.gateway.errors import RunNotFound
from services.kit.caller import Caller


class GetRun:
    """Shows a run as last heard, also while its model service is away."""

    def __init__(self, runs: RunStore) -> None:
        """Show what `runs` keeps."""
        self._runs = runs

    async def __call__(self, caller: Caller, run_id: str) -> Run:
        """Return the run.

        Raises:
            RunNotFound: the caller has no such run.
        """
        run = await self._runs.get(caller.tenant_id, run_id)
        if run is None:
            raise RunNotFound(run_id)
        return run
