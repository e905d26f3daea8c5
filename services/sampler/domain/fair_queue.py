"""A queue that gives each tenant its turn: first come, first served within a tenant, round robin between them."""

from collections import deque
from typing import Generic, TypeVar

_Item = TypeVar('_Item')


class FairQueue(Generic[_Item]):
    """Items waiting by tenant; a tenant with many does not delay one with few."""

    def __init__(self) -> None:
        """Begin empty."""
        self._items: dict[str, deque[_Item]] = {}

    def __len__(self) -> int:
        return sum(len(items) for items in self._items.values())

    def length_of(self, tenant_id: str) -> int:
        """Return how many items of a tenant wait."""
        return len(self._items.get(tenant_id, ()))

    def push(self, tenant_id: str, item: _Item) -> None:
        """Let an item wait behind those of its tenant."""
        self._items.setdefault(tenant_id, deque()).append(item)

    def pop(self) -> _Item:
        """Take the next item; its tenant goes to the back.

        Raises:
            IndexError: nothing waits.
        """
        if not self._items:
            raise IndexError('the queue is empty')
        tenant_id = next(iter(self._items))
        items = self._items.pop(tenant_id)
        item = items.popleft()
        if items:
            self._items[tenant_id] = items
        return item

    def discard(self, tenant_id: str, item: _Item) -> bool:
        """Take an item out; return whether it was there."""
        items = self._items.get(tenant_id)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._items[tenant_id]
        return True
