"""Futures within quotas: samples are counted when they are settled, so that each counts once however often it ran."""

from collections import OrderedDict

from services.gateway.futures.room import UNBOUNDED, Room
from services.gateway.futures.rules import Bounds, Future, FutureState
from services.gateway.futures.trainer_ports import Trainer
from services.gateway.quotas.limits import TrainingLimits
from services.gateway.quotas.meter import UsageMeter
from services.gateway.quotas.requests import is_save, refused_creation, refused_save
from services.gateway.quotas.rules import Work
from services.gateway.sampling.limits import SamplingGate, work_of
from services.gateway.sampling.rules import BatchRequest, PromptResult

SAMPLE_KIND = 'sample'
"""Kind of the futures that are samples."""
_MOST_UNSETTLED = 1 << 16
"""Samples whose work is remembered: far more than may run at a time."""


class SampleTally:
    """What samples took that ran here and are not settled yet, and who is told once they are."""

    def __init__(self, meter: UsageMeter) -> None:
        """Have `meter` count what is settled."""
        self._meter = meter
        self._works: OrderedDict[str, tuple[str, Work]] = OrderedDict()
        """By future: the run, and what it took."""

    def note(self, future: Future, order: BatchRequest, answer: PromptResult) -> None:
        """Note what came of a future; what it came to before counts for nothing."""
        self._works[future.future_id] = order.keys[0].run_id, work_of(answer)
        if len(self._works) > _MOST_UNSETTLED:
            self._works.popitem(last=False)

    def settled(self, future: Future, kept: Future) -> None:
        """Count a future that was to be settled as `future` and is kept as `kept`: as another, it was not done here."""
        work = self._works.pop(future.future_id, None)
        # The first attempt to settle it may have been kept, and only its answer lost: then the moment is another one.
        is_done_here = kept.state is FutureState.DONE and kept.owner == future.owner
        if work is not None and is_done_here:
            self._meter.count(future.tenant_id, *work)


class QuotaRoom(Room):
    """A room that holds samples to their tenants' quotas, before anything of them is kept."""

    def __init__(self, places: Bounds, *, sizes: Bounds = UNBOUNDED, gate: SamplingGate) -> None:
        """Begin empty; `gate` admits samples and counts them."""
        super().__init__(places, sizes=sizes)
        self._gate = gate

    def enter(self, future: Future, size_bytes: int = 0) -> None:
        """Let a new future in; one that is in already is never refused.

        Raises:
            QueueFull, BytesFull: as `Room`.
            QuotaExceeded: it is a sample, and its tenant may not sample now; with the time to try again.
        """
        if future.kind == SAMPLE_KIND:
            self._gate.check(future.tenant_id, future.future_id)
        super().enter(future, size_bytes)

    def enter_anyway(self, future: Future, size_bytes: int = 0) -> None:
        """Let a future in that was accepted before this process began."""
        super().enter_anyway(future, size_bytes)
        if future.kind == SAMPLE_KIND:
            self._gate.enter(future.tenant_id, future.future_id)

    def leave(self, future: Future) -> None:
        """Let a future out, for one of those who hold it."""
        super().leave(future)
        if future.kind == SAMPLE_KIND:
            self._gate.leave(future.tenant_id, future.future_id)


class LimitedTrainer:
    """A `Trainer` that holds the operations of futures to quotas: they wait while tokens are owed, without refusal."""

    def __init__(self, trainer: Trainer, limits: TrainingLimits) -> None:
        self._trainer = trainer
        self._limits = limits

    async def create_adapter(self, tenant_id: str, request: bytes, *, request_id: str) -> bytes:
        """Create an adapter and return the response. Repeating a request returns the adapter that it created.

        Raises:
            QuotaExceeded: The adapter would be new, and the tenant's limit is reached.
        """
        async with self._limits.creating(tenant_id) as limit:
            request = request if limit is None else refused_creation(request, limit)
            return await self._trainer.create_adapter(tenant_id, request, request_id=request_id)

    async def delete_adapter(self, tenant_id: str, request: bytes) -> bytes:
        return await self._trainer.delete_adapter(tenant_id, request)

    async def last_number(self, tenant_id: str, adapter_id: str) -> int:
        return await self._trainer.last_number(tenant_id, adapter_id)

    async def execute(self, tenant_id: str, request: bytes, *, number: int) -> bytes:
        """Run an operation once the tenant owes no tokens, and return the response.

        Raises:
            QuotaExceeded: The operation saves, and the tenant's storage is full.
        """
        await self._limits.enter(tenant_id, patience_seconds=None)
        if self._limits.is_storage_limited(tenant_id) and is_save(request):
            limit = await self._limits.full_limit(tenant_id)
            request = request if limit is None else refused_save(request, limit)
        return await self._trainer.execute(tenant_id, request, number=number)

    async def cancel(self, tenant_id: str, adapter_id: str, *, number: int) -> None:
        await self._trainer.cancel(tenant_id, adapter_id, number=number)
