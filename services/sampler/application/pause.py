"""Stop the engine between two steps."""

from enum import Enum

from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.sampler.application.abort import Abort
from services.sampler.application.admission import Admission
from services.sampler.ports import SamplerEngine


class PauseMode(Enum):
    """What becomes of running requests."""

    KEEP = 'keep'
    """They stop between two steps and go on later."""
    WAIT = 'wait'
    """The pause begins when they are done."""
    ABORT = 'abort'
    """They are aborted."""


class Pause:
    """For operators. From the moment it is asked for, new requests are refused until resumed."""

    def __init__(self, engine: SamplerEngine, admission: Admission, abort: Abort) -> None:
        """Act on `engine` and what runs in it."""
        self._engine = engine
        self._admission = admission
        self._abort = abort

    async def __call__(self, caller: Caller, mode: PauseMode) -> None:
        """Return when the engine is paused. Cancelling a wait opens it again.

        Raises:
            ScopeMissing: the caller is no operator.
        """
        require_scope(caller, 'operator')
        self._admission.close()
        is_paused = False
        try:
            if mode is PauseMode.ABORT:
                await self._abort.all()
            if mode is not PauseMode.KEEP:
                await self._admission.wait_idle()
            await self._engine.pause()
            is_paused = True
        finally:
            if not is_paused:
                self._admission.open()
