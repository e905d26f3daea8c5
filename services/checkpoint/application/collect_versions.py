"""Collect versions: delete what nobody pinned, published, read or followed for a long time.

An adapter whose run is over keeps its newest version for ever otherwise, since a ring lets go of
its newest only for a newer one.
"""

from datetime import timedelta

from services.checkpoint.application.announcements import Announcements
from services.checkpoint.application.exclusive import Exclusive
from services.checkpoint.application.noted_store import NotedStore
from services.checkpoint.domain import AdapterKey, Catalogue, NewestMark
from services.kit.clock import Clock
from services.kit.errors import AdapterNotFound


class CollectVersions:
    """Looks through every ring, and leaves alone those that somebody follows."""

    def __init__(
        self,
        catalogue: Catalogue,
        store: NotedStore,
        *,
        clock: Clock,
        announcements: Announcements,
        exclusive: Exclusive,
    ) -> None:
        """Use the ports and the service's shared objects."""
        self._catalogue = catalogue
        self._store = store
        self._clock = clock
        self._announcements = announcements
        self._exclusive = exclusive

    async def __call__(self, idle: timedelta) -> int:
        """Delete the versions that were not used for as long as `idle`; return how many there were."""
        count = 0
        for adapter in self._catalogue.adapters():
            count += await self._exclusive.run(adapter, lambda adapter=adapter: self._collect(adapter, idle))
        return count

    async def _collect(self, adapter: AdapterKey, idle: timedelta) -> int:
        try:
            ring = self._catalogue.ring(adapter)
        except AdapterNotFound:
            return 0
        if self._announcements.is_watched(adapter):
            return 0
        moment = self._clock.now() - idle
        unused = [
            version
            for version in ring.all_newest_first()
            if not version.is_pinned and self._store.last_use(version) < moment
        ]
        if ring.newest in unused:
            # Before anything is gone: numbers must not begin again, whenever the service ends.
            await self._store.mark_newest(NewestMark(adapter, ring.newest.version))
        for version in reversed(unused):
            ring.remove(version.version)
            await self._store.delete(version.key)
        return len(unused)
