"""Futures within quotas: samples are counted when they are settled, so that each counts once however often it ran."""

from collections import OrderedDict

from services.gateway.futures.room import UNBOUNDED, Room
from services.gateway.futures.rules import Future, FutureState
from services.gateway.quotas.meter import UsageMeter
from services.gateway.quotas.sampling import SamplingGate, work_of
from services.gateway.quotas.usage import Work
from services.gateway.sampling.fair_queue import Places
from services.gateway.sampling.rules import BatchOrder, PromptAnswer
from services.gateway.sampling.sample_places import SamplePlaces

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

    def note(self, future: Future, order: BatchOrder, answer: PromptAnswer) -> None:
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

    def __init__(self, places: Places, *, sizes: Places = UNBOUNDED, gate: SamplingGate, samples: SamplePlaces) -> None:
        """Begin empty; `gate` lets samples in, and those that are in have places among `samples`."""
        super().__init__(places, sizes=sizes)
        self._gate = gate
        self._samples = samples

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
            self._samples.enter(future.tenant_id, future.future_id)

    def leave(self, future: Future) -> None:
        """Let a future out, for one of those who hold it."""
        super().leave(future)
        if future.kind == SAMPLE_KIND:
            self._samples.leave(future.tenant_id, future.future_id)
