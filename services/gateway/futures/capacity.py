"""Limits of futures: their number and size, and the quotas of sampling."""

from collections import OrderedDict
from dataclasses import dataclass

from twinkle_services.gateway.futures.rules import SAMPLE_KIND, Bounds, Future, FutureState
from twinkle_services.gateway.quotas.enforcement import SamplingGate
from twinkle_services.gateway.quotas.rules import Work
from twinkle_services.gateway.quotas.usage_meter import UsageMeter
from twinkle_services.gateway.sampling.rules import BatchRequest, PromptResult
from twinkle_services.kit.errors import BytesFull, QueueFull

UNBOUNDED = Bounds(per_tenant=1 << 62, total=1 << 62)
_MAX_UNSETTLED = 1 << 16
"""Maximum number of sampling futures whose usage is remembered; more than usually run at the same time."""


@dataclass
class _Entry:
    """Unfinished future."""

    size_bytes: int
    holders: int = 1
    """Number of calls of `enter` and `enter_accepted` that no `leave` has undone."""


class FutureCapacity:
    """Limits the number of unfinished futures to `bounds`, and the total bytes of their requests to `sizes`.

    A future counts once, until `leave` has been called as often as `enter` and `enter_accepted` together. `gate` also
    counts the futures that sample, and applies quotas to them.
    """

    def __init__(self, bounds: Bounds, *, sizes: Bounds = UNBOUNDED, gate: SamplingGate | None = None) -> None:
        self._bounds = bounds
        self._sizes = sizes
        self._gate = gate
        self._entries: dict[str, dict[str, _Entry]] = {}
        self._bytes: dict[str, int] = {}
        self._count = 0

    @property
    def count(self) -> int:
        """Number of unfinished futures."""
        return self._count

    def enter(self, future: Future, size_bytes: int = 0) -> None:
        """Count a new future if the limits allow it; a future that is counted already is never refused.

        Raises:
            QueueFull: the tenant or all tenants together have too many futures.
            BytesFull: the requests of the tenant, or of all tenants, are too large in total.
            QuotaExceeded: the future samples, and its tenant has too many samples in flight or is over its token rate.
        """
        if (gate := self._gate_of(future)) is not None:
            gate.check(future.tenant_id, future.future_id)
        entries = self._entries.get(future.tenant_id, {})
        if future.future_id not in entries:
            _check(len(entries), 1, self._count, self._bounds, QueueFull)
            total = sum(self._bytes.values())
            _check(self._bytes.get(future.tenant_id, 0), size_bytes, total, self._sizes, BytesFull)
        self.enter_accepted(future, size_bytes)

    def enter_accepted(self, future: Future, size_bytes: int = 0) -> None:
        """Count a future that was accepted before, even beyond the bounds."""
        if (gate := self._gate_of(future)) is not None:
            gate.enter(future.tenant_id, future.future_id)
        entries = self._entries.setdefault(future.tenant_id, {})
        if (known := entries.get(future.future_id)) is not None:
            known.holders += 1
            return
        entries[future.future_id] = _Entry(size_bytes)
        self._count += 1
        self._bytes[future.tenant_id] = self._bytes.get(future.tenant_id, 0) + size_bytes

    def leave(self, future: Future) -> None:
        """Undo one call of `enter` or `enter_accepted`; an unknown future is ignored."""
        if (gate := self._gate_of(future)) is not None:
            gate.leave(future.tenant_id, future.future_id)
        entries = self._entries.get(future.tenant_id, {})
        if (known := entries.get(future.future_id)) is None:
            return
        known.holders -= 1
        if known.holders:
            return
        del entries[future.future_id]
        self._count -= 1
        self._bytes[future.tenant_id] -= known.size_bytes
        if not entries:
            del self._entries[future.tenant_id], self._bytes[future.tenant_id]

    def size_bytes(self, future: Future) -> int:
        """Return the size of the request of a counted future; 0 for other futures."""
        known = self._entries.get(future.tenant_id, {}).get(future.future_id)
        return known.size_bytes if known else 0

    def _gate_of(self, future: Future) -> SamplingGate | None:
        return self._gate if future.kind == SAMPLE_KIND else None


def _check(used: int, more: int, total: int, bounds: Bounds, refusal: type[QueueFull]) -> None:
    if used + more > bounds.per_tenant:
        raise refusal(queue_length=used, queue_limit=bounds.per_tenant)
    if total + more > bounds.total:
        raise refusal(queue_length=total, queue_limit=bounds.total)


class SampleTally:
    """Counts the usage of the sampling futures that run here. Each future counts once, when it is settled."""

    def __init__(self, meter: UsageMeter) -> None:
        self._meter = meter
        self._works: OrderedDict[str, tuple[str, Work]] = OrderedDict()
        """Run and usage, by the id of the future."""

    def note(self, future: Future, request: BatchRequest, result: PromptResult) -> None:
        """Record the usage of a future's last attempt; earlier attempts do not count."""
        self._works[future.future_id] = request.keys[0].run_id, result.work
        if len(self._works) > _MAX_UNSETTLED:
            self._works.popitem(last=False)

    def settled(self, future: Future, stored: Future) -> None:
        """Count the usage of a settled future, if the stored future is done and belongs to this gateway."""
        work = self._works.pop(future.future_id, None)
        # The finish times are not compared: they differ if an earlier attempt succeeded and its response was lost.
        if work is not None and stored.state is FutureState.DONE and stored.owner == future.owner:
            self._meter.count(future.tenant_id, *work)
