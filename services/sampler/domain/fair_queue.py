"""A queue with first-in, first-out order for each tenant, and round-robin order between tenants."""

from collections import deque
from typing import Generic, TypeVar

_Item = TypeVar('_Item')


class FairQueue(Generic[_Item]):
    """Waiting items by tenant; a tenant with many items does not delay a tenant with few."""

    def __init__(self) -> None:
        self._items: dict[str, deque[_Item]] = {}

    def __len__(self) -> int:
        return sum(len(items) for items in self._items.values())

    def length_of(self, tenant_id: str) -> int:
        """Return the number of waiting items of a tenant."""
        return len(self._items.get(tenant_id, ()))

    def push(self, tenant_id: str, item: _Item) -> None:
        """Append an item to its tenant's queue."""
        self._items.setdefault(tenant_id, deque()).append(item)

    def pop(self) -> _Item:
        """Remove and return the next item, and move its tenant to the end of the round-robin order.

        Raises:
            IndexError: The queue is empty.
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
        """Remove an item and return whether it was in the queue."""
        items = self._items.get(tenant_id)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._items[tenant_id]
        return True
