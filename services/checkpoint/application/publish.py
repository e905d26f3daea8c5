"""Publish: take a state from a trainer."""

from collections.abc import AsyncIterator

from services.checkpoint.application.commit_state import CommitState
from services.checkpoint.domain import AdapterKey, Record
from services.checkpoint.ports import StateWriter
from services.kit.authority import require_internal
from services.kit.caller import Caller
from services.kit.errors import DigestMismatch, InvalidField, StreamOutOfOrder
from services.kit.weights import Commit, Frame, FrameKind, Header, Transfer
from twinkle.checkpoint_engine import StateChunk


class Publish:
    """Makes a stream of frames a version or a checkpoint, or leaves everything as it was."""

    def __init__(self, commit: CommitState, *, state_limit_bytes: int) -> None:
        """Accept states of at most `state_limit_bytes`."""
        self._commit = commit
        self._state_limit_bytes = state_limit_bytes

    async def __call__(self, caller: Caller, frames: AsyncIterator[Frame]) -> Record:
        """Return what the state became.

        A state that is here already is answered from the record, without reading its bytes.

        Raises:
            ScopeMissing: the caller is no service.
            InvalidField: the state is too large, or a chunk lies outside it.
            StreamOutOfOrder, ChunkCorrupt, DigestMismatch: the frames are not what was announced.
            VersionConflict, CheckpointExists: something else is here.
            MemoryNotShared: the bytes are in a segment that cannot be opened here.
        """
        require_internal(caller)
        transfer = Transfer()
        header = await self._header(transfer, frames)
        adapter = AdapterKey(caller.tenant_id, header.adapter_id)
        known = self._commit.match(adapter, header)
        if known is not None:
            return known
        writer = self._commit.begin(adapter, header)
        try:
            if header.segment is not None:
                await writer.adopt(header.segment)
            async for frame in frames:
                await _take(transfer, frame, header, writer)
            transfer.end()
            return await self._commit(adapter, header, writer)
        finally:
            await writer.discard()

    async def _header(self, transfer: Transfer, frames: AsyncIterator[Frame]) -> Header:
        """Return the first frame, checked."""
        header = await anext(frames, None)
        if header is None:
            raise StreamOutOfOrder('a header')
        transfer.accept(FrameKind.of(header))
        assert isinstance(header, Header)  # noqa: S101 (the transfer has refused all others)
        if header.manifest.size_bytes > self._state_limit_bytes:
            field = 'frame.header.manifest.size_bytes'
            raise InvalidField(field, f'is {header.manifest.size_bytes}, at most {self._state_limit_bytes} are taken')
        return header


async def _take(transfer: Transfer, frame: Frame, header: Header, writer: StateWriter) -> None:
    transfer.accept(FrameKind.of(frame))
    if isinstance(frame, StateChunk):
        await writer.add(frame)
    elif isinstance(frame, Commit) and frame.digest != header.manifest.digest:
        raise DigestMismatch(header.manifest.digest, frame.digest)
