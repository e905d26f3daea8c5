"""Subscribe: send an adapter's newest version, and each later one when it comes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

from services.checkpoint.application.announcements import Announcements
from services.checkpoint.application.frames import header_of
from services.checkpoint.domain import AdapterKey, AdapterVersion, Catalogue, VersionKey
from services.checkpoint.ports import StateStore
from services.kit.authority import require_internal
from services.kit.caller import Caller
from services.kit.errors import VersionNotFound
from services.kit.weights import Base, Frame, Sender, StateBytes, Wanted


@dataclass(frozen=True)
class Subscription:
    """What a subscriber asks for."""

    adapter_id: str
    held_version: int = 0
    """Only later ones are sent, and a delta may start from it; 0 for none."""
    resume_version: int = 0
    """The version whose transfer was cut; 0 for none."""
    is_single: bool = False
    """End when the newest version is held."""
    wanted: Wanted = field(default_factory=Wanted)
    """What the subscriber can take, and where its cut transfer ended."""


@dataclass(frozen=True)
class Synced:
    """The subscriber holds the newest version."""


class Subscribe:
    """Follows one adapter. A subscriber that is slow gets fewer versions, and costs one chunk of memory."""

    def __init__(
        self, catalogue: Catalogue, store: StateStore, announcements: Announcements, *, sender: Sender
    ) -> None:
        """Use the catalogue's versions and the store's bytes."""
        self._catalogue = catalogue
        self._store = store
        self._announcements = announcements
        self._sender = sender

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
            async for frame in self._frames(version, _wanted(subscription, version, resume_version), held):
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

    async def _frames(self, version: AdapterVersion, wanted: Wanted, held: int) -> AsyncGenerator[Frame, None]:
        """Yield a version's frames; none where it left the ring before it could be opened."""
        try:
            source = await self._store.open_state(version.key, is_adapter_only=True)
        except VersionNotFound:
            if self._catalogue.ring(version.adapter).has(version.version):
                raise
            return
        base = Base(held, lambda: self._open_base(version.adapter, held)) if held else None
        header = header_of(version, source.manifest)
        async with aclosing(self._sender.frames(header, source, wanted=wanted, base=base)) as frames:
            async for frame in frames:
                yield frame

    async def _open_base(self, adapter: AdapterKey, held: int) -> StateBytes | None:
        """Return the version that the subscriber holds; None where it has left."""
        with suppress(VersionNotFound):
            return await self._store.open_state(VersionKey(adapter, held), is_adapter_only=True)
        return None


def _wanted(subscription: Subscription, version: AdapterVersion, resume_version: int) -> Wanted:
    """Return what the subscriber can take; where its cut transfer ended counts for that version only."""
    wanted = subscription.wanted
    return wanted if version.version == resume_version else replace(wanted, resume_offset=0, resume_digest='')
