"""Sends weights to other services, which subscribe to an adapter's versions or fetch one version or checkpoint."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

from twinkle.checkpoint_engine import WeightManifest
from twinkle_services.checkpoint.application.registry import Registry
from twinkle_services.checkpoint.domain import (
    AdapterKey,
    AdapterVersion,
    Checkpoint,
    Record,
    VersionKey,
    parse_checkpoint_path,
)
from twinkle_services.kit.caller import Caller, require_internal
from twinkle_services.kit.errors import CheckpointNotFound, VersionNotFound
from twinkle_services.kit.weights import (
    Base,
    CheckpointTarget,
    Frame,
    Header,
    ReceiverOptions,
    Sender,
    StateBytes,
    VersionTarget,
)


@dataclass(frozen=True)
class SubscribeRequest:
    """A request to follow an adapter."""

    adapter_id: str
    held_version: int = 0
    """Version that the subscriber has; 0 if it has none. Only later versions are sent, possibly as deltas."""
    resume_version: int = 0
    """Version whose transfer was interrupted; 0 if no transfer was interrupted."""
    is_single: bool = False
    """Whether the stream closes once the subscriber has the newest version."""
    receiver: ReceiverOptions = field(default_factory=ReceiverOptions)
    """Encodings that the subscriber accepts, and the position at which its last transfer was interrupted."""


@dataclass(frozen=True)
class Synced:
    """Reports that the subscriber has the newest version."""


@dataclass(frozen=True)
class VersionRef:
    """Reference to a version of an adapter; 0 selects the newest one."""

    adapter_id: str
    version: int


@dataclass(frozen=True)
class CheckpointRef:
    """Reference to a checkpoint by path or id."""

    path: str


@dataclass(frozen=True)
class FetchRequest:
    """A request for one state."""

    reference: VersionRef | CheckpointRef
    is_adapter_only: bool = False
    """Whether to leave out the section that only a trainer needs."""
    receiver: ReceiverOptions = field(default_factory=ReceiverOptions)
    """Encodings that the caller accepts, and the byte to start from."""


class WeightFeed:
    """Sends committed states as frames. Each reader needs memory for one chunk and, at most, one delta.

    A slow subscriber skips versions.
    """

    def __init__(self, registry: Registry, sender: Sender) -> None:
        self._registry = registry
        self._sender = sender

    async def subscribe(self, caller: Caller, request: SubscribeRequest) -> AsyncGenerator[Frame | Synced, None]:
        """Yield the frames of the newest version and of later ones, and `Synced` whenever there is no newer version.

        A version whose transfer was interrupted is sent first if it still exists.

        Raises:
            InternalOnly: The caller is not a service.
            AdapterNotFound: The tenant has no such adapter, or its versions were deleted.
            CheckpointDamaged: The files or the record of a version differ from the committed ones.
            Draining: The service is shutting down.
            InvalidField: The resume offset is larger than the version.
            ServiceUnreachable: A device transport failed; the receiver will request the bytes.
            StoreUnavailable: The disk cannot be used at the moment.
        """
        require_internal(caller)
        adapter = AdapterKey(caller.tenant_id, request.adapter_id)
        self._registry.catalogue.ring(adapter)
        with self._registry.announcements.watch(adapter) as changed:
            async with aclosing(self._follow(adapter, request, changed)) as events:
                async for event in events:
                    yield event

    async def fetch(self, caller: Caller, request: FetchRequest) -> AsyncGenerator[Frame, None]:
        """Yield the frames of one state.

        Raises:
            InternalOnly: The caller is not a service.
            AdapterNotFound, VersionNotFound, CheckpointNotFound: The state is missing, or the tenant may not read it.
            CheckpointDamaged: The record cannot be read, or the files differ from the committed ones.
            InvalidField: The offset is larger than the state.
            ServiceUnreachable: A device transport failed; the receiver will request the bytes.
            StoreUnavailable: The disk cannot be used at the moment.
        """
        require_internal(caller)
        record = self._find(caller, request.reference)
        source = await self._registry.store.open_state(record.key, is_adapter_only=request.is_adapter_only)
        header = _header_of(record, source.manifest)
        frames = self._sender.frames(header, source, receiver=request.receiver, offset_field='offset')
        async with aclosing(frames):
            async for frame in frames:
                yield frame

    def _find(self, caller: Caller, reference: VersionRef | CheckpointRef) -> Record:
        catalogue = self._registry.catalogue
        if isinstance(reference, VersionRef):
            return catalogue.ring(AdapterKey(caller.tenant_id, reference.adapter_id)).get(reference.version)
        key = parse_checkpoint_path(caller.tenant_id, reference.path)
        if key is None:
            raise CheckpointNotFound(reference.path)
        return catalogue.readable_checkpoint(key, now=self._registry.now())

    async def _follow(
        self, adapter: AdapterKey, request: SubscribeRequest, changed: asyncio.Event
    ) -> AsyncGenerator[Frame | Synced, None]:
        held, resume_version = request.held_version, request.resume_version
        while True:
            changed.clear()
            version = self._next(adapter, held, resume_version)
            if version is None:
                yield Synced()
                if request.is_single:
                    return
                await self._registry.announcements.wait(changed)
                continue
            async for frame in self._frames(version, _receiver_options(request, version, resume_version), held):
                yield frame
            held, resume_version = version.version, 0

    def _next(self, adapter: AdapterKey, held: int, resume_version: int) -> AdapterVersion | None:
        """Return the version to send next: the interrupted one if it still exists, otherwise the newest.

        Returns None if the subscriber has the newest version.
        """
        ring = self._registry.catalogue.ring(adapter)
        if resume_version > held:
            with suppress(VersionNotFound):
                return ring.get(resume_version)
        newest = ring.newest
        return newest if newest is not None and newest.version > held else None

    async def _frames(
        self, version: AdapterVersion, receiver: ReceiverOptions, held: int
    ) -> AsyncGenerator[Frame, None]:
        """Yield a version's frames; yield nothing if the version was evicted before it could be opened."""
        try:
            source = await self._registry.store.open_state(version.key, is_adapter_only=True)
        except VersionNotFound:
            if self._registry.catalogue.ring(version.adapter).has(version.version):
                raise
            return
        base = Base(held, lambda: self._open_base(version.adapter, held)) if held else None
        header = _header_of(version, source.manifest)
        async with aclosing(self._sender.frames(header, source, receiver=receiver, base=base)) as frames:
            async for frame in frames:
                yield frame

    async def _open_base(self, adapter: AdapterKey, held: int) -> StateBytes | None:
        """Open the version that the subscriber has; return None if it was evicted."""
        with suppress(VersionNotFound):
            return await self._registry.store.open_state(VersionKey(adapter, held), is_adapter_only=True)
        return None


def _receiver_options(request: SubscribeRequest, version: AdapterVersion, resume_version: int) -> ReceiverOptions:
    """Return the accepted encodings, with the resume position only for the version whose transfer was interrupted."""
    receiver = request.receiver
    return receiver if version.version == resume_version else replace(receiver, resume_offset=0, resume_digest='')


def _header_of(record: Record, manifest: WeightManifest) -> Header:
    """Return the header of a state to send; `manifest` describes the part that is sent."""
    if isinstance(record, Checkpoint):
        target = CheckpointTarget(record.key.name, step_count=record.step_count)
    else:
        target = VersionTarget(record.version, record.is_pinned, record.create_time)
    return Header(record.key.adapter.adapter_id, manifest, target)
