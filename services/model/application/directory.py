"""Every adapter of this replica, whose it is, and what changed: one owner for all verbs.

Concurrency: for one event loop; no method waits except `watch`.
"""

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from services.kit.authority import require_internal, require_scope
from services.kit.caller import Caller
from services.kit.errors import AdapterNotFound, Draining
from services.kit.ids import new_id
from services.kit.paging import SortKey
from services.model.domain.adapter import Adapter

_EVENTS_KEPT = 1024
"""A watcher that falls further behind gets a new snapshot, so that memory stays bounded."""


@dataclass(frozen=True, kw_only=True)
class AdapterEvent:
    """Something a watcher is told."""

    token: str
    """To resume after this event."""
    tenant_id: str = ''
    adapter: Adapter | None = None
    """It exists, and looks like this."""
    deleted_id: str = ''
    """It was deleted."""
    is_synced: bool = False
    """The snapshot is complete."""


class AdapterDirectory:
    """Finds adapters for callers; any that is another tenant's is as absent as one that never was."""

    def __init__(self) -> None:
        """Begin with no adapter."""
        self._adapters: dict[str, Adapter] = {}
        self._counts: Counter[str] = Counter()
        self._instance = new_id('dir')
        self._events: deque[tuple[int, AdapterEvent]] = deque(maxlen=_EVENTS_KEPT)
        self._event_count = 0
        self._changed = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of adapters, over all tenants."""
        return len(self._adapters)

    def count_of(self, tenant_id: str) -> int:
        """Return the number of a tenant's adapters."""
        return self._counts[tenant_id]

    def get(self, caller: Caller, adapter_id: str) -> Adapter:
        """Return the caller's adapter.

        Raises:
            ScopeMissing: the key may not train.
            AdapterNotFound: it is not there, or not the caller's.
        """
        require_scope(caller, 'train')
        adapter = self._adapters.get(adapter_id)
        if adapter is None or adapter.tenant_id != caller.tenant_id:
            raise AdapterNotFound(adapter_id)
        return adapter

    def find(self, adapter_id: str) -> Adapter | None:
        """Return an adapter whoever's it is, for the service's own use; None where there is none."""
        return self._adapters.get(adapter_id)

    def list(self, caller: Caller, *, after: SortKey | None, size: int, session_id: str = '') -> list[Adapter]:
        """Return up to `size` of the caller's adapters, newest first, after the sort key `after`.

        Args:
            caller: whose they are.
            after: of the last one that is known already.
            size: most to return.
            session_id: the session they were made in; empty: any.

        Raises:
            ScopeMissing: the key may not train.
        """
        require_scope(caller, 'train')
        wanted = (
            adapter
            for adapter in self._adapters.values()
            if adapter.tenant_id == caller.tenant_id
            and (not session_id or adapter.session_id == session_id)
            and (after is None or sort_key(adapter) < after)
        )
        return heapq.nlargest(size, wanted, key=sort_key)

    def put(self, adapter: Adapter) -> None:
        """Add an adapter, or replace what is known of it."""
        self._counts[adapter.tenant_id] += adapter.adapter_id not in self._adapters
        self._adapters[adapter.adapter_id] = adapter
        self._publish(tenant_id=adapter.tenant_id, adapter=adapter)

    def update(self, adapter_id: str, **changes: Any) -> None:
        """Change fields of an adapter; one that was deleted meanwhile stays deleted."""
        adapter = self._adapters.get(adapter_id)
        if adapter is not None:
            self.put(replace(adapter, **changes))

    def refresh(self, adapter: Adapter) -> None:
        """Replace what is known of an adapter; one that was deleted meanwhile stays deleted."""
        if adapter.adapter_id in self._adapters:
            self.put(adapter)

    def remove(self, caller: Caller, adapter_id: str) -> None:
        """Forget the caller's adapter.

        Raises:
            ScopeMissing: the key may not train.
            AdapterNotFound: it is not there, or not the caller's.
        """
        self.get(caller, adapter_id)
        del self._adapters[adapter_id]
        self._counts[caller.tenant_id] -= 1
        self._publish(tenant_id=caller.tenant_id, deleted_id=adapter_id)

    async def watch(self, caller: Caller, token: str) -> AsyncGenerator[AdapterEvent, None]:
        """Yield events until `close`: from `token` on if they are still kept, else after a snapshot.

        Raises:
            ScopeMissing: the caller is no service.
            Draining: the service ends.
        """
        require_internal(caller)
        position = self._position_of(token)
        while True:
            if position is None:
                position = self._event_count
                for adapter in list(self._adapters.values()):
                    yield AdapterEvent(token='', tenant_id=adapter.tenant_id, adapter=adapter)
                yield AdapterEvent(token=self._token(position), is_synced=True)
            if not self._is_kept(position):
                position = None
                continue
            for number, event in [item for item in self._events if item[0] > position]:
                position = number
                yield event
            if self._is_closed:
                raise Draining()
            if position == self._event_count:
                await self._changed.wait()

    def close(self) -> None:
        """End every watch: by themselves they would hold up the end of the service."""
        self._is_closed = True
        self._changed.set()

    def _publish(self, **facts: Any) -> None:
        self._event_count += 1
        event = AdapterEvent(token=self._token(self._event_count), **facts)
        self._events.append((self._event_count, event))
        self._changed.set()
        self._changed = asyncio.Event()

    def _token(self, number: int) -> str:
        return f'{self._instance}:{number}'

    def _position_of(self, token: str) -> int | None:
        instance, _, number = token.partition(':')
        if instance != self._instance or not number.isdigit() or int(number) > self._event_count:
            return None
        return int(number) if self._is_kept(int(number)) else None

    def _is_kept(self, position: int) -> bool:
        return position == self._event_count or (bool(self._events) and position >= self._events[0][0] - 1)


def sort_key(adapter: Adapter) -> tuple[str, str]:
    """Return what orders lists and what page tokens carry."""
    return adapter.create_time.isoformat(), adapter.adapter_id
