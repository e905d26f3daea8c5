"""Let a sleeping engine go on."""

from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.sampler.application.admission import Admission
from services.sampler.ports import SamplerEngine


class WakeUp:
    """For operators. Waking up what does not sleep is no error, and changes no pause."""

    def __init__(self, engine: SamplerEngine, admission: Admission) -> None:
        """Act on `engine` and its door."""
        self._engine = engine
        self._admission = admission

    async def __call__(self, caller: Caller) -> None:
        """Return when the engine is awake; it takes requests again unless it is paused.

        Raises:
            ScopeMissing: the caller is no operator.
        """
        require_scope(caller, 'operator')
        await self._engine.wake_up()
        if not self._engine.load.is_paused:
            self._admission.open()
