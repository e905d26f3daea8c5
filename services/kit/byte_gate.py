"""Bounds the bytes that are in memory at a time: of one tenant, and of all.

What is counted is up to the caller: bytes of bodies while they are read, of messages while they are served.
"""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

from services.kit.errors import BytesFull

_SMALL_BYTES = 1 << 16
"""What is smaller overtakes what is larger: polls and heartbeats go on while large bodies wait."""
_KEPT_FOR_SMALL = 16
"""One part of so many, of a tenant's bytes and of all, is for small ones only."""

_Line = tuple[str, bool]


@dataclass(eq=False)
class _Waiter:
    size_bytes: int
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


class ByteGate:
    """Lets bytes in while there is room, and has the rest wait for a while. For one event loop.

    Tenants that hold less go first, those of one tenant in their order. A tenant may take as much as it would leave
    free, so that a few of them never have all.
    """

    def __init__(self, *, tenant_bytes: int, total_bytes: int, wait_seconds: float | None) -> None:
        """Begin empty.

        Args:
            tenant_bytes: most that one tenant holds. What is larger by itself counts as this much, and so is alone.
            total_bytes: most that all hold.
            wait_seconds: how long what finds no room waits before it is refused; None: as long as it takes.
        """
        self._tenant_bytes = min(tenant_bytes, total_bytes * (_KEPT_FOR_SMALL - 1) // _KEPT_FOR_SMALL // 2)
        self._total_bytes = total_bytes
        self._wait_seconds = wait_seconds
        self._held: Counter[str] = Counter()
        self._lines: dict[_Line, deque[_Waiter]] = {}

    @property
    def held_bytes(self) -> int:
        """What all hold now."""
        return self._held.total()

    @property
    def largest_bytes(self) -> int:
        """Most that one thing counts."""
        return self._tenant_bytes * (_KEPT_FOR_SMALL - 1) // _KEPT_FOR_SMALL

    def hold(self, tenant_id: str) -> 'Hold':
        """Return a hold of nothing, which grows."""
        return Hold(self, tenant_id)

    async def take(self, tenant_id: str, size_bytes: int, *, of_bytes: int = 0) -> None:
        """Take bytes until they are given back.

        Args:
            tenant_id: whose they are.
            size_bytes: how many.
            of_bytes: how many were taken for the same thing before.

        Raises:
            BytesFull: there was no room for them in time.
        """
        waiter = _Waiter(size_bytes)
        line = tenant_id, of_bytes + size_bytes <= _SMALL_BYTES
        self._lines.setdefault(line, deque()).append(waiter)
        self._admit()
        if waiter.admitted.is_set():
            return
        try:
            async with asyncio.timeout(self._wait_seconds):
                await waiter.admitted.wait()
        except BaseException as error:
            self._leave(line, waiter)
            if isinstance(error, TimeoutError):
                raise BytesFull(self._held[tenant_id], self._tenant_bytes) from error
            raise

    def give_back(self, tenant_id: str, size_bytes: int) -> None:
        """Give back what was taken."""
        self._held[tenant_id] -= size_bytes
        if not self._held[tenant_id]:
            del self._held[tenant_id]
        self._admit()

    def _leave(self, line: _Line, waiter: _Waiter) -> None:
        """Take a waiter away that waits no more; one that was let in at that very moment gives it back."""
        if waiter.admitted.is_set():
            self.give_back(line[0], waiter.size_bytes)
            return
        self._lines[line].remove(waiter)
        if not self._lines[line]:
            del self._lines[line]
        self._admit()

    def _admit(self) -> None:
        is_waited_for = False
        for line in sorted(self._lines, key=lambda line: self._held[line[0]]):
            tenant_id, is_small = line
            waiting = self._lines[line]
            while waiting and not (is_waited_for and not is_small) and self._fits(line, waiting[0].size_bytes):
                waiter = waiting.popleft()
                self._held[tenant_id] += waiter.size_bytes
                waiter.admitted.set()
            if not waiting:
                del self._lines[line]
            elif not is_small and self._fits_tenant(line, waiting[0].size_bytes):
                # It waits for room among all: a larger one would wait for ever if others went on taking it.
                is_waited_for = True

    def _fits(self, line: _Line, size_bytes: int) -> bool:
        is_small = line[1]
        free = self._total_bytes - self._held.total()
        if not is_small:
            free -= self._total_bytes // _KEPT_FOR_SMALL
        share = size_bytes if is_small else self._held[line[0]] + size_bytes
        return share <= free and self._fits_tenant(line, size_bytes)

    def _fits_tenant(self, line: _Line, size_bytes: int) -> bool:
        tenant_id, is_small = line
        limit = self._tenant_bytes if is_small else self.largest_bytes
        return self._held[tenant_id] + size_bytes <= limit


class Hold:
    """What one call holds of a gate, given back as a whole."""

    def __init__(self, gate: ByteGate, tenant_id: str) -> None:
        """Hold nothing yet, for a tenant."""
        self._gate = gate
        self._tenant_id = tenant_id
        self._size_bytes = 0
        self._is_released = False

    async def grow(self, size_bytes: int) -> None:
        """Take more.

        Raises:
            BytesFull: there was no room for it in time.
        """
        more = min(size_bytes, self._gate.largest_bytes - self._size_bytes)
        if more <= 0 or self._is_released:
            return
        await self._gate.take(self._tenant_id, more, of_bytes=self._size_bytes)
        if self._is_released:
            # It was given back while this waited: nobody would do so again.
            self._gate.give_back(self._tenant_id, more)
            return
        self._size_bytes += more

    def shrink_to(self, size_bytes: int) -> None:
        """Give back all beyond `size_bytes`."""
        if size_bytes < self._size_bytes:
            self._gate.give_back(self._tenant_id, self._size_bytes - size_bytes)
            self._size_bytes = size_bytes

    def release(self) -> None:
        """Give all back, and take no more. Again is no error."""
        self.shrink_to(0)
        self._is_released = True
