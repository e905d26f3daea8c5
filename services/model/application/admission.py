"""Limits each tenant's operations in progress. Further operations are refused, or wait if the caller allows it.

The number of operations and the bytes of their requests are limited, both for operations in progress and for waiting
ones. Memory use therefore does not grow with the number of requests.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import Cancelled, QueueFull
from twinkle_services.model.domain.pace import Average

_INITIAL_WAIT = timedelta(seconds=1)
"""Estimated wait for a slot before the interval between releases is known."""
_MIN_WAIT, _MAX_WAIT = timedelta(milliseconds=50), timedelta(minutes=5)
"""Bounds of the estimated wait that a refusal reports."""


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """Limits per tenant."""

    operation_count: int
    """Maximum number of operations in progress; the same number may wait for a slot."""
    request_bytes: int
    """Maximum bytes of the requests in progress; the same amount may wait. A single larger request is allowed."""


@dataclass
class _Load:
    """Number and total size of operations."""

    count: int = 0
    size_bytes: int = 0

    def add(self, size_bytes: int) -> None:
        self.count += 1
        self.size_bytes += size_bytes

    def remove(self, size_bytes: int) -> None:
        self.count -= 1
        self.size_bytes -= size_bytes

    def has_capacity(self, size_bytes: int, limits: QueueLimits) -> bool:
        """Return whether one more operation is within the limits; the first is always accepted."""
        is_within_bytes = not self.count or self.size_bytes + size_bytes <= limits.request_bytes
        return self.count < limits.operation_count and is_within_bytes


@dataclass(frozen=True, eq=False)
class _Waiter:
    """A caller that waits for a slot."""

    adapter_id: str
    size_bytes: int
    admitted: asyncio.Future[None]


@dataclass
class _Tenant:
    """Slots of one tenant."""

    in_use: _Load = field(default_factory=_Load)
    waiting: _Load = field(default_factory=_Load)
    waiters: deque[_Waiter] = field(default_factory=deque[_Waiter])
    """Waiting callers, in order of arrival."""
    interval: Average = field(default_factory=Average)
    """Seconds between releases of slots."""
    last_release: float | None = None


class Admission:
    """Grants slots to operations. Concurrency: use it from one event loop only."""

    def __init__(self, limits: QueueLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}

    @asynccontextmanager
    async def slot(
        self,
        tenant_id: str,
        *,
        adapter_id: str = '',
        size_bytes: int = 0,
        is_waiting_allowed: bool,
        is_urgent: bool = False,
    ) -> AsyncIterator[None]:
        """Use a slot while the block runs.

        Args:
            tenant_id: Tenant of the operation.
            adapter_id: Adapter of the operation, by which `drop` finds it while it waits.
            size_bytes: Size of the request.
            is_waiting_allowed: Whether to wait for a slot if no slot is free; slots are granted in order of arrival.
            is_urgent: Whether to use a slot even beyond the limits. Set it if other operations in progress wait for
                this one, because refusing it would block them. At most one urgent operation of each adapter waits for
                its turn.

        Raises:
            QueueFull: No slot is free, and waiting is not allowed or too many operations are waiting already.
            Cancelled: The operation was cancelled by `drop` while it waited.
        """
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        is_free = not tenant.waiters and tenant.in_use.has_capacity(size_bytes, self._limits)
        if is_free or is_urgent:
            tenant.in_use.add(size_bytes)
        else:
            waiter = _Waiter(adapter_id, size_bytes, asyncio.get_running_loop().create_future())
            await self._wait(tenant_id, tenant, waiter, is_waiting_allowed=is_waiting_allowed)
        try:
            yield
        finally:
            now = self._clock.monotonic()
            if tenant.last_release is not None:
                tenant.interval.add(now - tenant.last_release)
            tenant.last_release = now
            self._release(tenant_id, tenant, size_bytes)

    def drop(self, adapter_id: str) -> None:
        """Cancel all operations of an adapter that wait for a slot."""
        for tenant in self._tenants.values():
            for waiter in tenant.waiters:
                if waiter.adapter_id == adapter_id and not waiter.admitted.done():
                    waiter.admitted.set_exception(Cancelled())

    async def _wait(self, tenant_id: str, tenant: _Tenant, waiter: _Waiter, *, is_waiting_allowed: bool) -> None:
        size_bytes = waiter.size_bytes
        if not is_waiting_allowed or not tenant.waiting.has_capacity(size_bytes, self._limits):
            raise self._refusal(tenant)
        tenant.waiters.append(waiter)
        tenant.waiting.add(size_bytes)
        try:
            await waiter.admitted
        except (asyncio.CancelledError, Cancelled):
            if waiter in tenant.waiters:
                tenant.waiters.remove(waiter)
                tenant.waiting.remove(size_bytes)
            else:
                # The slot was granted just as the caller disconnected or the operation was dropped.
                self._release(tenant_id, tenant, size_bytes)
            raise

    def _release(self, tenant_id: str, tenant: _Tenant, size_bytes: int) -> None:
        """Release a slot and grant free slots to the callers that have waited longest."""
        tenant.in_use.remove(size_bytes)
        while tenant.waiters and tenant.in_use.has_capacity(tenant.waiters[0].size_bytes, self._limits):
            waiter = tenant.waiters.popleft()
            tenant.waiting.remove(waiter.size_bytes)
            tenant.in_use.add(waiter.size_bytes)
            if waiter.admitted.done():
                # The task of the cancelled operation releases this slot.
                continue
            waiter.admitted.set_result(None)
        if not tenant.in_use.count and not tenant.waiters:
            del self._tenants[tenant_id]

    def _refusal(self, tenant: _Tenant) -> QueueFull:
        """Return the error, with the estimated time until all waiting operations and this one would have slots."""
        interval = tenant.interval.value
        wait = _INITIAL_WAIT if interval is None else timedelta(seconds=interval * (tenant.waiting.count + 1))
        return QueueFull(
            queue_length=tenant.in_use.count + tenant.waiting.count,
            queue_limit=self._limits.operation_count,
            wait=min(max(wait, _MIN_WAIT), _MAX_WAIT),
        )
