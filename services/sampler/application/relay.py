"""Relays versions to other samplers. A subscription follows the adapter, and sends resident versions immediately."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from twinkle.checkpoint_engine import PackedState
from twinkle_services.kit.caller import Caller, require_internal
from twinkle_services.kit.errors import Draining, VersionNotFound
from twinkle_services.kit.weights import (
    Base,
    BytesInMemory,
    Frame,
    Header,
    ReceiverOptions,
    SegmentRef,
    Sender,
    VersionTarget,
)
from twinkle_services.sampler.application.followers import Follower
from twinkle_services.sampler.application.versions_protocol import Versions
from twinkle_services.sampler.domain.adapter import AdapterKey, VersionKey
from twinkle_services.sampler.domain.residency import ResidentVersion
from twinkle_services.sampler.ports import Synced


@dataclass(frozen=True, kw_only=True)
class SubscribeRequest:
    """A request of another sampler to follow an adapter."""

    adapter_id: str
    held_version: int = 0
    """Version that the subscriber has; 0 if it has none. Only later versions are sent, possibly as deltas."""
    resume_version: int = 0
    """Version whose transfer was interrupted; 0 if no transfer was interrupted."""
    is_single: bool = False
    """Whether the stream closes once the subscriber has the newest version."""
    receiver: ReceiverOptions = field(default_factory=ReceiverOptions)
    """Encodings that the subscriber accepts, and the position at which its last transfer was interrupted."""


@dataclass(frozen=True, kw_only=True)
class FetchRequest:
    """A request of another sampler for one version."""

    adapter_id: str
    version: int
    """Version to send; 0 for the newest resident one."""
    receiver: ReceiverOptions = field(default_factory=ReceiverOptions)
    """Encodings that the caller accepts, and the byte to start from."""


class Relay:
    """Sends versions from this sampler's memory.

    Each reader needs memory for one chunk and, at most, one delta. A slow reader skips the versions that newer ones
    replace while it reads.
    """

    def __init__(self, versions: Versions, sender: Sender, *, host_id: str = '') -> None:
        """Create a relay.

        Args:
            versions: Versions of this sampler.
            sender: Encodes states as frames.
            host_id: Id of the shared memory that contains this process's segments; empty without shared memory.
        """
        self._versions = versions
        self._sender = sender
        self._host_id = host_id
        self._closing = asyncio.Event()

    async def subscribe(self, caller: Caller, request: SubscribeRequest) -> AsyncGenerator[Frame | Synced, None]:
        """Yield frames of the newest version and of later ones, and `Synced` whenever there is no newer version.

        Raises:
            ScopeMissing: The caller is not a service.
            NotFound: The checkpoint service has no such adapter, or the adapter's newest version is not resident here.
            VersionNotReady: The maximum number of adapters is followed already.
            InvalidField: The resume offset is larger than the version.
            ServiceUnreachable: A device transport failed; the receiver will request the bytes.
            DomainError: The stream from which this sampler receives the adapter failed with this error.
            Draining: This sampler is shutting down.
        """
        require_internal(caller)
        adapter = AdapterKey(caller.tenant_id, request.adapter_id)
        held, synced_at = request.held_version, -1
        while True:
            with self._versions.followers.following(caller, adapter) as follower:
                newest = self._versions.newest(adapter)
                if newest is not None and newest.key.version > held:
                    async with aclosing(self._frames(newest, _receiver_options(request, newest), held)) as frames:
                        async for frame in frames:
                            yield frame
                    held = newest.key.version
                    continue
                if follower.newest > held:
                    raise VersionNotFound(request.adapter_id, follower.newest)
                if follower.is_synced and synced_at != held:
                    synced_at = held
                    yield Synced()
                    if request.is_single:
                        return
                await self._wait(follower)

    async def fetch(self, caller: Caller, request: FetchRequest) -> AsyncGenerator[Frame, None]:
        """Yield the frames of a resident version.

        Raises:
            ScopeMissing: The caller is not a service.
            VersionNotFound: The version is not resident, or its bytes were not retained.
            InvalidField: The offset is larger than the version.
            ServiceUnreachable: A device transport failed; the receiver will request the bytes.
        """
        require_internal(caller)
        adapter = AdapterKey(caller.tenant_id, request.adapter_id)
        version = (
            self._versions.get(VersionKey(adapter, request.version))
            if request.version
            else self._versions.newest(adapter)
        )
        if version is None:
            raise VersionNotFound(request.adapter_id, request.version)
        async with aclosing(self._frames(version, request.receiver, 0)) as frames:
            async for frame in frames:
                yield frame

    def close(self) -> None:
        """Make every subscription raise `Draining`, so that open ones do not delay shutdown."""
        self._closing.set()

    async def _frames(
        self, version: ResidentVersion, receiver: ReceiverOptions, held: int
    ) -> AsyncGenerator[Frame, None]:
        key = version.key
        source = self._open(version)
        if source is None:
            raise VersionNotFound(key.adapter.name, key.version)
        publish_time = version.weights.publish_time if version.weights else None
        target = VersionTarget(key.version, publish_time=publish_time)
        header = Header(key.adapter.name, source.manifest, target)
        base = Base(held, lambda: self._open_base(VersionKey(key.adapter, held))) if held else None
        async with aclosing(self._sender.frames(header, source, receiver=receiver, base=base)) as frames:
            async for frame in frames:
                yield frame

    async def _open_base(self, key: VersionKey) -> BytesInMemory | None:
        version = self._versions.get(key)
        return self._open(version) if version else None

    def _open(self, version: ResidentVersion) -> BytesInMemory | None:
        """Return the bytes of a version, which stay readable after it is unloaded; None if they were not retained."""
        weights = version.weights
        if weights is None or not isinstance(weights.packed, PackedState):
            return None
        state, segment = weights.packed, None
        if weights.segment_path and self._host_id:
            segment = SegmentRef(self._host_id, PurePath(weights.segment_path).name, len(state.data))
        return BytesInMemory(state.manifest, memoryview(state.data), segment=segment)

    async def _wait(self, follower: Follower) -> None:
        """Wait for the next change of the follower.

        Raises:
            Draining: The relay is closing.
            DomainError: The stream of versions failed with this error.
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


def _receiver_options(request: SubscribeRequest, version: ResidentVersion) -> ReceiverOptions:
    """Return the accepted encodings, with the resume position only for the version whose transfer was interrupted."""
    is_resumed = version.key.version == request.resume_version
    return request.receiver if is_resumed else replace(request.receiver, resume_offset=0, resume_digest='')
