"""Publishes states: a trainer's stream of frames becomes a version or a checkpoint."""

from collections.abc import AsyncIterator

from twinkle.checkpoint_engine import StateChunk
from twinkle_services.checkpoint.application.registry import Registry
from twinkle_services.checkpoint.domain import AdapterKey, Record
from twinkle_services.checkpoint.ports import StateWriter
from twinkle_services.kit.caller import Caller, require_internal
from twinkle_services.kit.errors import DigestMismatch, InvalidField, StreamOutOfOrder
from twinkle_services.kit.weights import Commit, Frame, FrameKind, Header, Transfer


class Publisher:
    """Receives states. A stream either commits its state completely or has no effect."""

    def __init__(self, registry: Registry, *, state_limit_bytes: int) -> None:
        self._registry = registry
        self._state_limit_bytes = state_limit_bytes

    async def publish(self, caller: Caller, frames: AsyncIterator[Frame]) -> Record:
        """Commit the state that the frames contain and return its record.

        If the state is already committed, return its record without reading the bytes.

        Raises:
            InternalOnly: The caller is not a service.
            InvalidField: The state is too large, or a chunk or the segment does not match the size of the state.
            StreamOutOfOrder, ChunkCorrupt, DigestMismatch: A frame is missing, out of order or damaged, or the bytes do
                not match the announced digest.
            VersionConflict, CheckpointExists: Another state is committed under the same key, or a newer version exists.
            CheckpointDamaged: The record under the same key cannot be read, and overwriting is not allowed.
            QuotaExceeded: The request pins the version, and the adapter has the maximum number of pins.
            MemoryNotShared: The bytes are in a segment that this service cannot open.
            DiskFull, StoreUnavailable: The disk has too little space, or cannot be used at the moment.
        """
        require_internal(caller)
        transfer = Transfer()
        header = await self._header(transfer, frames)
        adapter = AdapterKey(caller.tenant_id, header.adapter_id)
        known = self._registry.match(adapter, header)
        if known is not None:
            return known
        writer = self._registry.begin(adapter, header)
        try:
            if header.segment is not None:
                await writer.adopt(header.segment)
            async for frame in frames:
                await _receive(transfer, frame, header, writer)
            transfer.end()
            return await self._registry.commit(adapter, header, writer)
        finally:
            await writer.discard()

    async def _header(self, transfer: Transfer, frames: AsyncIterator[Frame]) -> Header:
        """Return the first frame after checking that it is a header within the size limit."""
        header = await anext(frames, None)
        if header is None:
            raise StreamOutOfOrder('a header')
        transfer.accept(FrameKind.of(header))
        assert isinstance(header, Header)  # noqa: S101 (the transfer accepts only a header first)
        if header.manifest.size_bytes > self._state_limit_bytes:
            problem = f'is {header.manifest.size_bytes}, must be at most {self._state_limit_bytes}'
            raise InvalidField('frame.header.manifest.size_bytes', problem)
        return header


async def _receive(transfer: Transfer, frame: Frame, header: Header, writer: StateWriter) -> None:
    transfer.accept(FrameKind.of(frame))
    if isinstance(frame, StateChunk):
        await writer.add(frame)
    elif isinstance(frame, Commit) and frame.digest != header.manifest.digest:
        raise DigestMismatch(header.manifest.digest, frame.digest, field='frame.header.manifest.digest')
