"""Limits on the bytes in memory, per tenant and in total.

The caller chooses which bytes to count, such as bodies being read or messages being served.
"""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

from twinkle_services.kit.errors import BytesFull

_SMALL_BYTES = 1 << 16
"""Maximum size of a small request. Small requests overtake larger ones, so that polls and heartbeats continue while
large bodies wait."""
_RESERVED_FRACTION = 16
"""Each limit is divided by this number, and the result is reserved for small requests."""

_QueueKey = tuple[str, bool]
"""Tenant, and whether the requests are small."""


@dataclass(eq=False)
class _Waiter:
    size_bytes: int
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


class ByteGate:
    """Admits requests for bytes up to the limits and queues the others. Use it from one event loop only.

    Tenants with fewer bytes in use are served first. The small and the large requests of a tenant form separate queues,
    each served in order. A large request is admitted only if the bytes of its tenant, including the request, do not
    exceed the free bytes that are not reserved for small requests. A few tenants therefore cannot take all bytes.
    """

    def __init__(self, *, tenant_bytes: int, total_bytes: int, wait_seconds: float | None) -> None:
        """Create an empty gate.

        Args:
            tenant_bytes: Limit per tenant. A value above half of the bytes that are not reserved for small requests is
                reduced to this half.
            total_bytes: Limit of all tenants together.
            wait_seconds: Time that a request waits for free bytes before it is refused; None for no limit.
        """
        self._tenant_bytes = min(tenant_bytes, total_bytes * (_RESERVED_FRACTION - 1) // _RESERVED_FRACTION // 2)
        self._total_bytes = total_bytes
        self._wait_seconds = wait_seconds
        self._held: Counter[str] = Counter()
        self._queues: dict[_QueueKey, deque[_Waiter]] = {}

    @property
    def held_bytes(self) -> int:
        """Number of bytes that all tenants use."""
        return self._held.total()

    @property
    def largest_bytes(self) -> int:
        """Maximum number of bytes counted for one request.

        While a tenant has a request of this size, its other large requests wait.
        """
        return self._tenant_bytes * (_RESERVED_FRACTION - 1) // _RESERVED_FRACTION

    def hold(self, tenant_id: str) -> 'Hold':
        """Return an empty hold for a tenant."""
        return Hold(self, tenant_id)

    async def take(self, tenant_id: str, size_bytes: int, *, taken_bytes: int = 0) -> None:
        """Take bytes, and wait until they are free if necessary.

        Args:
            tenant_id: Tenant that the bytes count for.
            size_bytes: Number of bytes, at most `largest_bytes`.
            taken_bytes: Number of bytes that the same request has already taken.

        Raises:
            BytesFull: The bytes did not become free in time.
        """
        waiter = _Waiter(size_bytes)
        key = tenant_id, taken_bytes + size_bytes <= _SMALL_BYTES
        self._queues.setdefault(key, deque()).append(waiter)
        self._admit()
        if waiter.admitted.is_set():
            return
        try:
            async with asyncio.timeout(self._wait_seconds):
                await waiter.admitted.wait()
        except BaseException as error:
            self._leave(key, waiter)
            if isinstance(error, TimeoutError):
                raise self._refusal(key, size_bytes) from error
            raise

    def give_back(self, tenant_id: str, size_bytes: int) -> None:
        """Release bytes that were taken."""
        self._held[tenant_id] -= size_bytes
        if not self._held[tenant_id]:
            del self._held[tenant_id]
        self._admit()

    def _leave(self, key: _QueueKey, waiter: _Waiter) -> None:
        """Remove a waiter that gave up; if it was admitted at the same moment, release its bytes."""
        if waiter.admitted.is_set():
            self.give_back(key[0], waiter.size_bytes)
            return
        self._queues[key].remove(waiter)
        if not self._queues[key]:
            del self._queues[key]
        self._admit()

    def _admit(self) -> None:
        is_reserved = False
        for key in sorted(self._queues, key=lambda key: self._held[key[0]]):
            tenant_id, is_small = key
            queue = self._queues[key]
            while queue and not (is_reserved and not is_small) and self._fits(key, queue[0].size_bytes):
                waiter = queue.popleft()
                self._held[tenant_id] += waiter.size_bytes
                waiter.admitted.set()
            if not queue:
                del self._queues[key]
            elif not is_small and self._fits_tenant(key, queue[0].size_bytes):
                # The request waits for the total limit. It would starve if later large requests took the free bytes.
                is_reserved = True

    def _refusal(self, key: _QueueKey, size_bytes: int) -> BytesFull:
        """Return the error of a request that was not admitted, with the numbers of the limit that it waited for."""
        if self._fits_tenant(key, size_bytes):
            return BytesFull(self._held.total(), self._total_bytes)
        return BytesFull(self._held[key[0]], self._tenant_bytes)

    def _fits(self, key: _QueueKey, size_bytes: int) -> bool:
        is_small = key[1]
        free = self._total_bytes - self._held.total()
        if not is_small:
            free -= self._total_bytes // _RESERVED_FRACTION
        share = size_bytes if is_small else self._held[key[0]] + size_bytes
        return share <= free and self._fits_tenant(key, size_bytes)

    def _fits_tenant(self, key: _QueueKey, size_bytes: int) -> bool:
        tenant_id, is_small = key
        limit = self._tenant_bytes if is_small else self.largest_bytes
        return self._held[tenant_id] + size_bytes <= limit


class Hold:
    """Bytes that one call has taken from a gate."""

    def __init__(self, gate: ByteGate, tenant_id: str) -> None:
        self._gate = gate
        self._tenant_id = tenant_id
        self._size_bytes = 0
        self._is_released = False

    async def grow(self, size_bytes: int) -> None:
        """Take more bytes, up to `ByteGate.largest_bytes` in total.

        Raises:
            BytesFull: The bytes did not become free in time.
        """
        more = min(size_bytes, self._gate.largest_bytes - self._size_bytes)
        if more <= 0 or self._is_released:
            return
        await self._gate.take(self._tenant_id, more, taken_bytes=self._size_bytes)
        if self._is_released:
            # The hold was released while this call waited, so nothing else would release these bytes.
            self._gate.give_back(self._tenant_id, more)
            return
        self._size_bytes += more

    def shrink_to(self, size_bytes: int) -> None:
        """Release all bytes beyond `size_bytes`."""
        if size_bytes < self._size_bytes:
            self._gate.give_back(self._tenant_id, self._size_bytes - size_bytes)
            self._size_bytes = size_bytes

    def release(self) -> None:
        """Release all bytes and ignore later calls of `grow`. Idempotent."""
        self.shrink_to(0)
        self._is_released = True
