"""Subscribe: send an adapter's newest version, and each later one when it comes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass

from services.checkpoint.application.announcements import Announcements
from services.checkpoint.application.frames import Frame, frames_of
from services.checkpoint.domain import AdapterKey, AdapterVersion, Catalogue
from services.checkpoint.ports import StateStore
from services.kit.authority import require_internal
from services.kit.caller import Caller
from services.kit.errors import VersionNotFound


@dataclass(frozen=True)
class Subscription:
    """What a subscriber asks for."""

    adapter_id: str
    held_version: int = 0
    """Only later ones are sent; 0 for any."""
    resume_version: int = 0
    """The version whose transfer was cut; 0 for none."""
    resume_offset: int = 0
    """Bytes of it that are held."""
    is_single: bool = False
    """End when the newest version is held."""


@dataclass(frozen=True)
class Synced:
    """The subscriber holds the newest version."""


class Subscribe:
    """Follows one adapter. A subscriber that is slow gets fewer versions, and costs one chunk of memory."""

    def __init__(self, catalogue: Catalogue, store: StateStore, announcements: Announcements) -> None:
        """Use the catalogue's versions and the store's bytes."""
        self._catalogue = catalogue
        self._store = store
        self._announcements = announcements

    async def __call__(self, caller: Caller, subscription: Subscription) -> AsyncGenerator[Frame | Synced, None]:
        """Yield frames, and `Synced` whenever there is no newer version.

        Raises:
            ScopeMissing: the caller is no service.
            AdapterNotFound: nothing was ever published.
            Draining: the service ends.
            InvalidField: the offset lies behind the version that is to be resumed.
        """
        require_internal(caller)
        adapter = AdapterKey(caller.tenant_id, subscription.adapter_id)
        self._catalogue.ring(adapter)
        with self._announcements.watch(adapter) as news:
            async with aclosing(self._follow(adapter, subscription, news)) as events:
                async for event in events:
                    yield event

    async def _follow(
        self, adapter: AdapterKey, subscription: Subscription, news: asyncio.Event
    ) -> AsyncGenerator[Frame | Synced, None]:
        held, resume_version = subscription.held_version, subscription.resume_version
        while True:
            news.clear()
            version = self._next(adapter, held, resume_version)
            if version is None:
                yield Synced()
                if subscription.is_single:
                    return
                await self._announcements.wait(news)
                continue
            offset = subscription.resume_offset if version.version == resume_version else 0
            async for frame in self._frames(version, offset):
                yield frame
            held, resume_version = version.version, 0

    def _next(self, adapter: AdapterKey, held: int, resume_version: int) -> AdapterVersion | None:
        """Return the version to send: the one to go on with while it is here, else the newest."""
        ring = self._catalogue.ring(adapter)
        if resume_version > held:
            with suppress(VersionNotFound):
                return ring.get(resume_version)
        newest = ring.newest
        return newest if newest is not None and newest.version > held else None

    async def _frames(self, version: AdapterVersion, offset: int) -> AsyncGenerator[Frame, None]:
        """Yield a version's frames; none where it left the ring before it could be opened."""
        try:
            source = await self._store.open_state(version.key, is_adapter_only=True)
        except VersionNotFound:
            if self._catalogue.ring(version.adapter).has(version.version):
                raise
            return
        async with aclosing(frames_of(version, source, offset=offset, field='resume_offset')) as frames:
            async for frame in frames:
                yield frame
