"""Pass versions on to other samplers: what is held here goes to who asks, and what is not is followed first."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from services.kit.authority import require_internal
from services.kit.caller import Caller
from services.kit.errors import Draining, VersionNotFound
from services.kit.weights import Base, Frame, Header, HeldBytes, SegmentRef, Sender, VersionTarget, Wanted
from services.sampler.application.following import Follower
from services.sampler.application.versions import Versions
from services.sampler.domain.adapter import AdapterKey, VersionKey
from services.sampler.domain.residency import ResidentVersion
from services.sampler.ports import Synced
from twinkle.checkpoint_engine import PackedState


@dataclass(frozen=True, kw_only=True)
class Subscription:
    """What another sampler asks for."""

    adapter_id: str
    held_version: int = 0
    """Only later ones are sent, and a delta may start from it; 0 for none."""
    resume_version: int = 0
    """The version whose transfer was cut; 0 for none."""
    is_single: bool = False
    """End when the newest version is held."""
    wanted: Wanted = field(default_factory=Wanted)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """One version that another sampler asks for."""

    adapter_id: str
    version: int
    """0: the newest that is here."""
    wanted: Wanted = field(default_factory=Wanted)


class Relay:
    """Sends versions from this sampler's memory. A reader that is slow costs one chunk, and gets fewer versions."""

    def __init__(self, versions: Versions, sender: Sender, *, host_id: str = '') -> None:
        """Send what `versions` holds.

        Args:
            versions: of this sampler.
            sender: makes frames.
            host_id: of the memory that segments of this process lie in; empty: there is none.
        """
        self._versions = versions
        self._sender = sender
        self._host_id = host_id
        self._closing = asyncio.Event()

    async def subscribe(self, caller: Caller, wish: Subscription) -> AsyncGenerator[Frame | Synced, None]:
        """Yield frames of the newest version and of later ones, and `Synced` whenever there is none.

        Raises:
            ScopeMissing: the caller is no service.
            NotFound: the checkpoint service knows nothing of it, or the newest is not held here.
            Draining: this sampler ends.
        """
        require_internal(caller)
        adapter = AdapterKey(caller.tenant_id, wish.adapter_id)
        held, told = wish.held_version, -1
        while True:
            with self._versions.followers.following(caller, adapter) as follower:
                newest = self._versions.newest(adapter)
                if newest is not None and newest.key.version > held:
                    async with aclosing(self._frames(newest, _wanted(wish, newest), held)) as frames:
                        async for frame in frames:
                            yield frame
                    held = newest.key.version
                    continue
                if follower.newest > held:
                    raise VersionNotFound(wish.adapter_id, follower.newest)
                if follower.is_synced and told != held:
                    told = held
                    yield Synced()
                    if wish.is_single:
                        return
                await self._wait(follower)

    async def fetch(self, caller: Caller, wish: Wish) -> AsyncGenerator[Frame, None]:
        """Yield the frames of a version that is held here.

        Raises:
            ScopeMissing: the caller is no service.
            VersionNotFound: it is not held here.
        """
        require_internal(caller)
        adapter = AdapterKey(caller.tenant_id, wish.adapter_id)
        version = (
            self._versions.get(VersionKey(adapter, wish.version)) if wish.version else self._versions.newest(adapter)
        )
        if version is None:
            raise VersionNotFound(wish.adapter_id, wish.version)
        async with aclosing(self._frames(version, wish.wanted, 0)) as frames:
            async for frame in frames:
                yield frame

    def close(self) -> None:
        """End every subscription: by themselves they would hold up the end of the service."""
        self._closing.set()

    async def _frames(self, version: ResidentVersion, wanted: Wanted, held: int) -> AsyncGenerator[Frame, None]:
        key = version.key
        source = self._open(version)
        if source is None:
            raise VersionNotFound(key.adapter.name, key.version)
        header = Header(key.adapter.name, source.manifest, VersionTarget(key.version))
        base = Base(held, lambda: self._open_base(VersionKey(key.adapter, held))) if held else None
        async with aclosing(self._sender.frames(header, source, wanted=wanted, base=base)) as frames:
            async for frame in frames:
                yield frame

    async def _open_base(self, key: VersionKey) -> HeldBytes | None:
        version = self._versions.get(key)
        return self._open(version) if version else None

    def _open(self, version: ResidentVersion) -> HeldBytes | None:
        """Return the bytes of a version; they stay while they are read, even if it is dropped meanwhile."""
        weights = version.weights
        if weights is None or not isinstance(weights.packed, PackedState):
            return None
        state, segment = weights.packed, None
        if weights.segment_path and self._host_id:
            segment = SegmentRef(self._host_id, PurePath(weights.segment_path).name, len(state.data))
        return HeldBytes(state.manifest, memoryview(state.data), segment=segment)

    async def _wait(self, follower: Follower) -> None:
        """Wait for news.

        Raises:
            Draining: there will be none.
            DomainError: what the stream of versions ended with.
        """
        tasks = [asyncio.ensure_future(waiting) for waiting in (follower.wait_for_change(), self._closing.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        if self._closing.is_set():
            raise Draining()
        if tasks[0].done() and not tasks[0].cancelled():
            tasks[0].result()


def _wanted(wish: Subscription, version: ResidentVersion) -> Wanted:
    """Return what the reader can take; where its cut transfer ended counts for that version only."""
    is_resumed = version.key.version == wish.resume_version
    return wish.wanted if is_resumed else replace(wish.wanted, resume_offset=0, resume_digest='')
