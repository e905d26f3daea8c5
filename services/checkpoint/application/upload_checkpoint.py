"""Upload a checkpoint: a peft folder made elsewhere becomes a checkpoint of a run of its own."""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.checkpoint.application.commit_state import CommitState
from services.checkpoint.application.frames import CheckpointTarget, Header
from services.checkpoint.domain import AdapterKey, Checkpoint
from services.checkpoint.ports import StateSource, Upload, UploadStore
from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import InvalidField, StreamOutOfOrder
from twinkle.checkpoint_engine import CHUNK_BYTES, StateChunk, chunk_checksum


@dataclass(frozen=True)
class UploadHeader:
    """Announces an upload."""

    upload_id: str
    name: str
    base_model: str
    size_bytes: int
    """Bytes of the tar archive."""


class UploadCheckpoint:
    """Takes an archive, over several streams if need be."""

    def __init__(self, commit: CommitState, uploads: UploadStore, *, state_limit_bytes: int) -> None:
        """Accept archives of at most `state_limit_bytes`."""
        self._commit = commit
        self._uploads = uploads
        self._state_limit_bytes = state_limit_bytes

    async def __call__(self, caller: Caller, parts: AsyncIterator[UploadHeader | StateChunk]) -> Checkpoint:
        """Return the checkpoint.

        The run is named after tenant and upload, so the same upload again is the same checkpoint.

        Raises:
            ScopeMissing: the key may not.
            InvalidField: the archive is too large, or no peft folder of safetensors.
            ChunkCorrupt, StreamOutOfOrder: a chunk is damaged, or does not follow what is held.
            InUse: another stream sends this upload.
            CheckpointExists: the upload became another checkpoint already.
        """
        require_scope(caller, 'train')
        header = await anext(parts, None)
        if not isinstance(header, UploadHeader):
            raise StreamOutOfOrder('a header')
        if header.size_bytes > self._state_limit_bytes:
            raise InvalidField(
                'header.size_bytes', f'is {header.size_bytes}, at most {self._state_limit_bytes} are taken'
            )
        upload = await self._uploads.open(caller.tenant_id, header.upload_id, size_bytes=header.size_bytes)
        try:
            await _receive(upload, header, parts)
            checkpoint = await self._import(caller, header, upload)
            await upload.discard()
            return checkpoint
        finally:
            await upload.close()

    async def _import(self, caller: Caller, header: UploadHeader, upload: Upload) -> Checkpoint:
        source = await upload.open_adapter(header.base_model)
        try:
            adapter = AdapterKey(caller.tenant_id, _run_of(caller.tenant_id, header.upload_id))
            announcement = Header(adapter.adapter_id, source.manifest, CheckpointTarget(header.name))
            return await self._store(adapter, announcement, source)
        finally:
            await source.close()

    async def _store(self, adapter: AdapterKey, header: Header, source: StateSource) -> Checkpoint:
        record = self._commit.match(adapter, header)
        if record is None:
            writer = self._commit.begin(adapter, header)
            try:
                for begin in range(0, source.size_bytes, CHUNK_BYTES):
                    data = await source.read(begin, CHUNK_BYTES)
                    await writer.add(StateChunk(begin, data, chunk_checksum(data)))
                record = await self._commit(adapter, header, writer)
            finally:
                await writer.discard()
        assert isinstance(record, Checkpoint)  # noqa: S101 (the target was one)
        return record


async def _receive(upload: Upload, header: UploadHeader, parts: AsyncIterator[UploadHeader | StateChunk]) -> None:
    async for part in parts:
        if isinstance(part, UploadHeader):
            raise StreamOutOfOrder('a chunk')
        await upload.add(part)
    if upload.held_bytes < header.size_bytes:
        raise StreamOutOfOrder(f'a chunk at byte {upload.held_bytes}')


def _run_of(tenant_id: str, upload_id: str) -> str:
    return 'up-' + hashlib.blake2s(f'{tenant_id}\0{upload_id}'.encode(), digest_size=10).hexdigest()
