"""The directory of all adapters of this replica, with lookup by owner and a change feed.

Concurrency: use it from one event loop only. Only `watch` waits.
"""

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from twinkle_services.kit.caller import Caller, require_internal, require_scope
from twinkle_services.kit.errors import AdapterExpired, AdapterNotFound, Draining
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.paging import SortKey
from twinkle_services.model.domain.adapter import MAX_EXPIRED, Adapter, ExpiredAdapter
from twinkle_services.model.domain.errors import AdapterDamaged

_MAX_EVENTS = 1024
"""Maximum number of stored events. A watcher that needs an older event receives a new snapshot."""


@dataclass(frozen=True, kw_only=True)
class AdapterEvent:
    """An event of the change feed."""

    token: str
    """Resume token of this event; empty within a snapshot."""
    tenant_id: str = ''
    adapter: Adapter | None = None
    """The adapter after its creation or change."""
    has_new_report: bool = True
    """Whether the change added a report of metrics; also true for all events other than changes of adapters."""
    deleted_id: str = ''
    """Id of a deleted adapter."""
    damaged_id: str = ''
    """Id of an adapter whose record is damaged."""
    is_synced: bool = False
    """Whether the event marks the end of the snapshot."""


class AdapterDirectory:
    """Looks up adapters for their owners; adapters of other tenants are reported as not found."""

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}
        self._damaged: dict[str, str] = {}
        """Tenants of the adapters whose records are damaged, by adapter id."""
        self._expired: dict[str, ExpiredAdapter] = {}
        """Records of expired adapters by id, oldest first."""
        self._counts: Counter[str] = Counter()
        self._instance = new_id('dir')
        self._events: deque[tuple[int, AdapterEvent]] = deque(maxlen=_MAX_EVENTS)
        self._event_count = 0
        self._changed = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of adapters of all tenants."""
        return len(self._adapters)

    def count_of(self, tenant_id: str) -> int:
        """Return the number of a tenant's adapters."""
        return self._counts[tenant_id]

    def get(self, caller: Caller, adapter_id: str) -> Adapter:
        """Return the caller's adapter.

        Raises:
            ScopeMissing: The API key lacks the scope `train`.
            AdapterNotFound: The caller has no such adapter.
            AdapterExpired: The adapter was removed because it was unused.
            AdapterDamaged: The record of the adapter is damaged.
        """
        if self.is_damaged(caller, adapter_id):
            raise AdapterDamaged(adapter_id, 'its record is damaged')
        adapter = self._adapters.get(adapter_id)
        expired = self._expired.get(adapter_id)
        if expired is not None and expired.tenant_id == caller.tenant_id:
            raise AdapterExpired(adapter_id, expired.checkpoint_path)
        if adapter is None or adapter.tenant_id != caller.tenant_id:
            raise AdapterNotFound(adapter_id)
        return adapter

    def all(self) -> list[Adapter]:
        """Return the adapters of all tenants, for internal use."""
        return [*self._adapters.values()]

    def find(self, adapter_id: str) -> Adapter | None:
        """Return an adapter of any tenant, for internal use; None if it does not exist."""
        return self._adapters.get(adapter_id)

    def list(self, caller: Caller, *, after: SortKey | None, size: int, session_id: str = '') -> list[Adapter]:
        """Return up to `size` of the caller's adapters, newest first.

        Args:
            caller: Owner of the adapters.
            after: Sort key of the last adapter of the previous page; None for the first page.
            size: Maximum number to return.
            session_id: Session in which the adapters were created; empty for all sessions.

        Raises:
            ScopeMissing: The API key lacks the scope `train`.
        """
        require_scope(caller, 'train')
        matching = (
            adapter
            for adapter in self._adapters.values()
            if adapter.tenant_id == caller.tenant_id
            and (not session_id or adapter.session_id == session_id)
            and (after is None or sort_key(adapter) < after)
        )
        return heapq.nlargest(size, matching, key=sort_key)

    def put(self, adapter: Adapter) -> None:
        """Add or replace an adapter."""
        self._expired.pop(adapter.adapter_id, None)
        before = self._adapters.get(adapter.adapter_id)
        self._counts[adapter.tenant_id] += before is None
        self._adapters[adapter.adapter_id] = adapter
        has_new_report = before is None or before.metrics.reports != adapter.metrics.reports
        self._publish(adapter.tenant_id, adapter=adapter, has_new_report=has_new_report)

    def put_damaged(self, adapter_id: str, tenant_id: str) -> None:
        """Add an adapter whose record cannot be read; it is not listed, and `get` raises AdapterDamaged."""
        self._damaged[adapter_id] = tenant_id

    def is_damaged(self, caller: Caller, adapter_id: str) -> bool:
        """Return whether the caller has an adapter with this id whose record cannot be read.

        Raises:
            ScopeMissing: The API key lacks the scope `train`.
        """
        require_scope(caller, 'train')
        return self._damaged.get(adapter_id) == caller.tenant_id

    def remove_damaged(self, adapter_id: str) -> None:
        """Remove an adapter whose record cannot be read."""
        tenant_id = self._damaged.pop(adapter_id, None)
        if tenant_id is not None:
            self._publish(tenant_id, deleted_id=adapter_id)

    def update(self, adapter_id: str, **changes: Any) -> None:
        """Change fields of an adapter; do nothing if it was deleted."""
        adapter = self._adapters.get(adapter_id)
        if adapter is not None:
            self.put(replace(adapter, **changes))

    def refresh(self, adapter: Adapter) -> None:
        """Replace an adapter; do nothing if it was deleted."""
        if adapter.adapter_id in self._adapters:
            self.put(adapter)

    def remove(self, caller: Caller, adapter_id: str) -> None:
        """Remove the caller's adapter.

        Raises:
            DomainError: `get` raised it.
        """
        self.get(caller, adapter_id)
        self._remove(adapter_id)

    def expire(self, expired: ExpiredAdapter) -> None:
        """Record an expired adapter, and remove the adapter if it exists; `get` then raises AdapterExpired."""
        if expired.adapter_id in self._adapters:
            self._remove(expired.adapter_id)
        self._expired[expired.adapter_id] = expired
        if len(self._expired) > MAX_EXPIRED:
            del self._expired[next(iter(self._expired))]

    async def watch(
        self, caller: Caller, token: str, *, is_reports_only: bool = False
    ) -> AsyncGenerator[AdapterEvent, None]:
        """Yield the events after `token`, until `close` is called.

        If these events are no longer stored, a snapshot is sent first. A slow watcher also receives a new snapshot.

        Args:
            caller: A service.
            token: Token of the last event that was received; empty for a snapshot.
            is_reports_only: Whether to leave out changes of adapters that add no report of metrics.

        Raises:
            ScopeMissing: The caller is not a service.
            Draining: `close` was called, because the service is shutting down.
        """
        require_internal(caller)
        position = self._position_of(token)
        while True:
            if position is None:
                position = self._event_count
                for adapter in list(self._adapters.values()):
                    yield AdapterEvent(token='', tenant_id=adapter.tenant_id, adapter=adapter)
                for adapter_id, tenant_id in list(self._damaged.items()):
                    yield AdapterEvent(token='', tenant_id=tenant_id, damaged_id=adapter_id)
                yield AdapterEvent(token=self._token(position), is_synced=True)
            if not self._is_stored(position):
                position = None
                continue
            # Skips the stored events before the position, up to `_MAX_EVENTS`.
            new = list(islice(reversed(self._events), self._event_count - position))
            for number, event in reversed(new):
                position = number
                if event.has_new_report or not is_reports_only:
                    yield event
            if self._is_closed:
                raise Draining()
            if position == self._event_count:
                await self._changed.wait()

    def close(self) -> None:
        """Close all watches; otherwise open watches would delay the shutdown."""
        self._is_closed = True
        self._changed.set()

    def _remove(self, adapter_id: str) -> None:
        adapter = self._adapters.pop(adapter_id)
        self._counts[adapter.tenant_id] -= 1
        self._publish(adapter.tenant_id, deleted_id=adapter_id)

    def _publish(self, tenant_id: str, **event_fields: Any) -> None:
        self._event_count += 1
        event = AdapterEvent(token=self._token(self._event_count), tenant_id=tenant_id, **event_fields)
        self._events.append((self._event_count, event))
        self._changed.set()
        self._changed = asyncio.Event()

    def _token(self, number: int) -> str:
        return f'{self._instance}:{number}'

    def _position_of(self, token: str) -> int | None:
        instance, _, number = token.partition(':')
        if instance != self._instance or not number.isdigit() or int(number) > self._event_count:
            return None
        return int(number) if self._is_stored(int(number)) else None

    def _is_stored(self, position: int) -> bool:
        return position == self._event_count or (bool(self._events) and position >= self._events[0][0] - 1)


def sort_key(adapter: Adapter) -> tuple[str, str]:
    """Return the key by which lists of adapters are sorted; page tokens contain the key."""
    return adapter.create_time.isoformat(), adapter.adapter_id
