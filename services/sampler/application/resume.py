"""Let the engine go on."""

from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.sampler.application.admission import Admission
from services.sampler.ports import SamplerEngine


class Resume:
    """For operators. Resuming what runs is no error; what sleeps goes on sleeping."""

    def __init__(self, engine: SamplerEngine, admission: Admission) -> None:
        """Act on `engine` and its door."""
        self._engine = engine
        self._admission = admission

    async def __call__(self, caller: Caller) -> None:
        """Return when the engine runs.

        Raises:
            ScopeMissing: the caller is no operator.
        """
        require_scope(caller, 'operator')
        await self._engine.resume()
        if not self._engine.load.is_sleeping:
            self._admission.open()
