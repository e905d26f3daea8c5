"""Control of the engine: aborts, pauses, sleep, resets of the prefix cache, and watches of the load."""

import asyncio
from collections.abc import AsyncGenerator
from datetime import timedelta
from enum import Enum

from twinkle_services.kit.caller import Caller, require_scope
from twinkle_services.kit.errors import Draining, NotSupportedHere
from twinkle_services.sampler.application.admission import Admission
from twinkle_services.sampler.domain.generation import EngineLoad, SleepLevel
from twinkle_services.sampler.domain.running_requests import RunningRequest, RunningRequests
from twinkle_services.sampler.ports import SamplerEngine


class PauseMode(Enum):
    """The treatment of running requests during a pause."""

    KEEP = 'keep'
    """Stop running requests between two steps and continue them on resume."""
    WAIT = 'wait'
    """Wait for running requests to finish before pausing."""
    ABORT = 'abort'
    """Abort running requests before pausing; calls that only compute log-probabilities then fail with Cancelled."""


class EngineControl:
    """Controls one engine. Tenants may abort their requests and watch the load. Other methods are for operators."""

    def __init__(self, engine: SamplerEngine, admission: Admission, requests: RunningRequests) -> None:
        self._engine = engine
        self._admission = admission
        self._requests = requests
        self._closed = asyncio.Event()

    @property
    def load(self) -> EngineLoad:
        """Current load, including the prompts that wait for a slot."""
        return self._admission.load

    async def abort(self, caller: Caller, request_id: str) -> None:
        """Abort a sampling request of the caller. Its sequences finish with `StopReason.ABORT`; its call succeeds.

        Raises:
            RequestNotFound: The caller has no running request with that id.
        """
        await self._abort(self._requests.find(caller.tenant_id, request_id))

    async def pause(self, caller: Caller, mode: PauseMode) -> None:
        """Pause the engine. New requests are refused from this call until `resume`.

        If the call fails or is cancelled before the engine is paused, requests are admitted again, unless the engine
        was already paused or asleep.

        Raises:
            ScopeMissing: The caller is not an operator.
        """
        require_scope(caller, 'operator')
        was_open = self._admission.is_open
        self._admission.close()
        is_paused = False
        try:
            if mode is PauseMode.ABORT:
                for request in self._requests.all():
                    await self._abort(request)
            if mode is not PauseMode.KEEP:
                await self._admission.wait_idle()
            await self._engine.pause()
            is_paused = True
        finally:
            if was_open and not is_paused:
                self._admission.open()

    async def resume(self, caller: Caller) -> None:
        """Resume a paused engine. A running engine does not change, and a sleeping engine continues to sleep.

        Raises:
            ScopeMissing: The caller is not an operator.
        """
        require_scope(caller, 'operator')
        await self._engine.resume()
        if not self._engine.load.is_sleeping:
            self._admission.open()

    async def sleep(self, caller: Caller, level: SleepLevel) -> None:
        """Release the accelerator's memory once running requests are done.

        New requests are refused from this call until `wake_up`. If the call fails or is cancelled before the engine
        sleeps, requests are admitted again, unless the engine was already paused or asleep.

        Raises:
            ScopeMissing: The caller is not an operator.
            NotSupportedHere: The engine cannot sleep, or does not support this level; nothing changed.
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

    async def wake_up(self, caller: Caller) -> None:
        """Wake a sleeping engine; it admits requests again unless it is also paused.

        Raises:
            ScopeMissing: The caller is not an operator.
        """
        require_scope(caller, 'operator')
        await self._engine.wake_up()
        if not self._engine.load.is_paused:
            self._admission.open()

    async def reset_prefix_cache(self, caller: Caller) -> int:
        """Clear the prefix cache; the next requests of all tenants are slower.

        Returns:
            Number of dropped tokens; an estimate with vLLM.

        Raises:
            ScopeMissing: The caller is not an operator.
        """
        require_scope(caller, 'operator')
        return await self._engine.reset_prefix_cache()

    async def watch_load(self, interval: timedelta) -> AsyncGenerator[EngineLoad, None]:
        """Yield the load immediately and then once per `interval`.

        Raises:
            Draining: The service is shutting down.
        """
        while not self._closed.is_set():
            yield self._admission.load
            try:
                async with asyncio.timeout(interval.total_seconds()):
                    await self._closed.wait()
            except TimeoutError:
                continue
        raise Draining()

    def close(self) -> None:
        """Make every `watch_load` raise `Draining`, so that open watches do not delay shutdown."""
        self._closed.set()

    async def _abort(self, request: RunningRequest) -> None:
        request.is_aborted = True
        self._admission.admit_aborted(request)
        for engine_request_id in list(request.engine_request_ids):
            await self._engine.abort(engine_request_id)
