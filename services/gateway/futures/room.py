"""How much may wait: beyond it, requests are refused, so that nothing grows without bound."""

from dataclasses import dataclass

from services.gateway.futures.rules import Bounds, Future
from services.kit.errors import BytesFull, QueueFull

UNBOUNDED = Bounds(per_tenant=1 << 62, total=1 << 62)


@dataclass
class _Held:
    """One future, and how many there are who hold it."""

    size_bytes: int
    holders: int = 1


class Room:
    """Futures that were accepted, or are about to be, and are not finished, with the bytes of their requests.

    Whoever enters a future leaves it again; it is counted until the last one has.
    """

    def __init__(self, places: Bounds, *, sizes: Bounds = UNBOUNDED) -> None:
        """Begin empty.

        Args:
            places: how many futures.
            sizes: how many bytes their requests have together.
        """
        self._places = places
        self._sizes = sizes
        self._held: dict[str, dict[str, _Held]] = {}
        self._bytes: dict[str, int] = {}
        self._count = 0

    def enter(self, future: Future, size_bytes: int = 0) -> None:
        """Let a new future in; one that is in already is never refused.

        Raises:
            QueueFull: its tenant has as many as it may, or all have.
            BytesFull: the same, of bytes.
        """
        held = self._held.get(future.tenant_id, {})
        if future.future_id not in held:
            _check(len(held), 1, self._count, self._places, QueueFull)
            of_all = sum(self._bytes.values())
            _check(self._bytes.get(future.tenant_id, 0), size_bytes, of_all, self._sizes, BytesFull)
        self.enter_anyway(future, size_bytes)

    def enter_anyway(self, future: Future, size_bytes: int = 0) -> None:
        """Let a future in that was accepted before this process began."""
        held = self._held.setdefault(future.tenant_id, {})
        known = held.get(future.future_id)
        if known is not None:
            known.holders += 1
            return
        held[future.future_id] = _Held(size_bytes)
        self._count += 1
        self._bytes[future.tenant_id] = self._bytes.get(future.tenant_id, 0) + size_bytes

    def leave(self, future: Future) -> None:
        """Let a future out, for one of those who hold it; one that is not in is no error."""
        held = self._held.get(future.tenant_id, {})
        known = held.get(future.future_id)
        if known is None:
            return
        known.holders -= 1
        if known.holders:
            return
        del held[future.future_id]
        self._count -= 1
        self._bytes[future.tenant_id] -= known.size_bytes
        if not held:
            del self._held[future.tenant_id], self._bytes[future.tenant_id]

    def size_bytes(self, future: Future) -> int:
        """Return how many bytes the request of a future has that is in; 0 of others."""
        known = self._held.get(future.tenant_id, {}).get(future.future_id)
        return known.size_bytes if known else 0


def _check(own: int, more: int, of_all: int, limits: Bounds, refusal: type[QueueFull]) -> None:
    if own + more > limits.per_tenant:
        raise refusal(queue_length=own, queue_limit=limits.per_tenant)
    if of_all + more > limits.total:
        raise refusal(queue_length=of_all, queue_limit=limits.total)
