"""Takes over the runs of an ended trainer, another model service with the same base model.

The journal moves the runs, so that exactly one trainer has each run at any time. The runs are then registered and
recovered as after a restart of this service.
"""

import asyncio

import structlog

from twinkle_services.kit.caller import Caller, require_scope
from twinkle_services.kit.errors import BaseModelNotFound
from twinkle_services.kit.worker import completed
from twinkle_services.model.application.lifecycle import Recover
from twinkle_services.model.ports import Ports

_log = structlog.get_logger('takeover')


class TakeOver:
    """Takes over runs from journals on shared storage. Concurrency: use it from one event loop only."""

    def __init__(self, ports: Ports, recover: Recover) -> None:
        self._ports = ports
        self._recover = recover
        self._lock = asyncio.Lock()

    async def __call__(self, caller: Caller, base_model: str, trainer: str) -> int:
        """Take over all runs of an ended trainer, and return their number.

        Cancellation: a takeover that has started completes. Idempotency: the call can be repeated, even after a crash.

        Raises:
            ScopeMissing: The caller is not an operator.
            BaseModelNotFound: This service does not serve the base model.
            InvalidField: The configuration names no such trainer.
            TakeoverRefused: The trainer is running, or its journal cannot be used; no run was moved.
            JournalUnavailable: A disk failed; repeat the call.
        """
        require_scope(caller, 'operator')
        known = tuple(model.base_model for model in self._ports.backend.facts().base_models)
        if base_model not in known:
            raise BaseModelNotFound(base_model, known)
        return await completed(self._take_over(trainer))

    async def _take_over(self, trainer: str) -> int:
        async with self._lock:
            moved = await self._ports.journal.take_over(trainer)
            await self._recover.register(moved)
            # After this step, gateways send repeated creation requests here, so the runs must be registered first.
            await self._ports.journal.complete_take_over()
        _log.info('runs taken over', trainer=trainer, count=len(moved))
        return len(moved)
