"""How busy the engine is."""

from dataclasses import replace

from services.sampler.application.admission import Admission
from services.sampler.domain.generation import EngineLoad
from services.sampler.ports import SamplerEngine


class GetLoad:
    """Adds the prompts that wait before the engine to what the engine says."""

    def __init__(self, engine: SamplerEngine, admission: Admission) -> None:
        """Ask `engine` and `admission`."""
        self._engine = engine
        self._admission = admission

    async def __call__(self) -> EngineLoad:
        """Return the load now."""
        return self.now()

    def now(self) -> EngineLoad:
        """Return the load now, without waiting for anything."""
        load = self._engine.load
        return replace(load, waiting_sequences=load.waiting_sequences + self._admission.waiting_count)
