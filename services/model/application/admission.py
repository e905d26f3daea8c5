"""How much a tenant may have waiting: overload is refused, or waits for its waiter if the caller prefers.

Both the operations and the bytes of their requests are bounded, and so is what waits for a place, so that
memory does not grow with the number of requests.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from services.kit.clock import Clock
from services.kit.errors import QueueFull
from services.model.domain.pace import Average

_FIRST_GUESS = timedelta(seconds=1)
"""Until a place is free, where none was given back yet."""
_SHORTEST, _LONGEST = timedelta(milliseconds=50), timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """Of one tenant."""

    operation_count: int
    """Under way at a time; as many again may wait for a place."""
    request_bytes: int
    """Of the requests under way; as much again may wait. One request alone may have more."""


@dataclass
class _Load:
    """Operations and their bytes."""

    count: int = 0
    size_bytes: int = 0

    def add(self, size_bytes: int) -> None:
        self.count += 1
        self.size_bytes += size_bytes

    def remove(self, size_bytes: int) -> None:
        self.count -= 1
        self.size_bytes -= size_bytes

    def has_capacity(self, size_bytes: int, limits: QueueLimits) -> bool:
        """Say whether one more is within the limits; the first one is, whatever its size."""
        is_in_bytes = not self.count or self.size_bytes + size_bytes <= limits.request_bytes
        return self.count < limits.operation_count and is_in_bytes


@dataclass(frozen=True, eq=False)
class _Waiter:
    """A caller that waits for a place."""

    size_bytes: int
    admitted: asyncio.Future[None]


@dataclass
class _Tenant:
    """Places of one tenant."""

    held: _Load = field(default_factory=_Load)
    waiting: _Load = field(default_factory=_Load)
    waiters: deque[_Waiter] = field(default_factory=deque[_Waiter])
    """Those that wait, first come first served."""
    interval: Average = field(default_factory=Average)
    """Seconds between places that were given back."""
    last_release: float | None = None


class Admission:
    """Gives places to operations. For one event loop."""

    def __init__(self, limits: QueueLimits, clock: Clock) -> None:
        """Begin with no place taken."""
        self._limits = limits
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}

    @asynccontextmanager
    async def slot(
        self, tenant_id: str, *, size_bytes: int = 0, is_waiting_allowed: bool, is_urgent: bool = False
    ) -> AsyncIterator[None]:
        """Hold a place while the block runs.

        Args:
            tenant_id: whose it is.
            size_bytes: of the request.
            is_waiting_allowed: wait for a place where there is none. Places are given in the order of asking.
            is_urgent: take a place beyond the limits. For an operation that others under way wait for: refusing
                it would hold up all of them. There is at most one of each adapter.

        Raises:
            QueueFull: there is no place, and waiting is not allowed, or too much waits already.
        """
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        is_free = not tenant.waiters and tenant.held.has_capacity(size_bytes, self._limits)
        if is_free or is_urgent:
            tenant.held.add(size_bytes)
        else:
            await self._wait(tenant_id, tenant, size_bytes, is_waiting_allowed=is_waiting_allowed)
        try:
            yield
        finally:
            now = self._clock.monotonic()
            if tenant.last_release is not None:
                tenant.interval.add(now - tenant.last_release)
            tenant.last_release = now
            self._release(tenant_id, tenant, size_bytes)

    async def _wait(self, tenant_id: str, tenant: _Tenant, size_bytes: int, *, is_waiting_allowed: bool) -> None:
        if not is_waiting_allowed or not tenant.waiting.has_capacity(size_bytes, self._limits):
            raise self._refusal(tenant)
        waiter = _Waiter(size_bytes, asyncio.get_running_loop().create_future())
        tenant.waiters.append(waiter)
        tenant.waiting.add(size_bytes)
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter in tenant.waiters:
                tenant.waiters.remove(waiter)
                tenant.waiting.remove(size_bytes)
            else:
                # The place came in the moment the caller left.
                self._release(tenant_id, tenant, size_bytes)
            raise

    def _release(self, tenant_id: str, tenant: _Tenant, size_bytes: int) -> None:
        """Free a place, for those that waited longest."""
        tenant.held.remove(size_bytes)
        while tenant.waiters and tenant.held.has_capacity(tenant.waiters[0].size_bytes, self._limits):
            waiter = tenant.waiters.popleft()
            tenant.waiting.remove(waiter.size_bytes)
            tenant.held.add(waiter.size_bytes)
            if waiter.admitted.cancelled():
                # Its caller is about to find out, and frees the place again.
                continue
            waiter.admitted.set_result(None)
        if not tenant.held.count and not tenant.waiters:
            del self._tenants[tenant_id]

    def _refusal(self, tenant: _Tenant) -> QueueFull:
        """Return the refusal, with the time after which those that wait should have had their places."""
        interval = tenant.interval.value
        wait = _FIRST_GUESS if interval is None else timedelta(seconds=interval * (tenant.waiting.count + 1))
        return QueueFull(
            queue_length=tenant.held.count + tenant.waiting.count,
            queue_limit=self._limits.operation_count,
            wait=min(max(wait, _SHORTEST), _LONGEST),
        )
