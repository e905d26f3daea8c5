"""Give the accelerator's memory back for a while."""

from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import NotSupportedHere
from services.sampler.application.admission import Admission
from services.sampler.domain.generation import SleepLevel
from services.sampler.ports import SamplerEngine


class Sleep:
    """For operators. From the moment it is asked for, new requests are refused until woken up."""

    def __init__(self, engine: SamplerEngine, admission: Admission) -> None:
        """Act on `engine` and its door."""
        self._engine = engine
        self._admission = admission

    async def __call__(self, caller: Caller, level: SleepLevel) -> None:
        """Return when the engine sleeps, once running requests are done. Cancelling a wait opens it again.

        Raises:
            ScopeMissing: the caller is no operator.
            NotSupportedHere: engine or platform cannot; nothing changed.
        """
        require_scope(caller, 'operator')
        if not self._engine.facts.can_sleep:
            raise NotSupportedHere('sleep', self._engine.facts.engine)
        was_open = self._admission.is_open
        self._admission.close()
        is_asleep = False
        try:
            await self._admission.wait_idle()
            await self._engine.sleep(level)
            is_asleep = True
        finally:
            if was_open and not is_asleep:
                self._admission.open()
