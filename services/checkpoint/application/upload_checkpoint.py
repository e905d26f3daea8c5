"""Upload a checkpoint: a peft folder made elsewhere becomes a checkpoint of a run of its own."""

import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from services.checkpoint.application.commit_state import CommitState
from services.checkpoint.application.frames import CheckpointTarget, Header
from services.checkpoint.domain import AdapterKey, Checkpoint
from services.checkpoint.ports import BaseModels, Upload, UploadStore
from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import InvalidArgument, InvalidField, StreamOutOfOrder
from twinkle.checkpoint_engine import StateChunk


@dataclass(frozen=True)
class UploadHeader:
    """Announces an upload."""

    upload_id: str
    name: str
    base_model: str
    size_bytes: int
    """Bytes of the tar archive, as they are sent."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """The owner's labels."""


@dataclass(frozen=True, kw_only=True)
class Intake:
    """Where states come in, and what is taken."""

    uploads: UploadStore
    """Keeps archives until they are whole."""
    base_models: BaseModels
    """What adapters that are uploaded have to fit."""
    state_limit_bytes: int
    """Largest state or archive."""


class UploadCheckpoint:
    """Takes an archive, over several streams if need be."""

    def __init__(self, commit: CommitState, intake: Intake) -> None:
        """Accept what `intake` takes."""
        self._commit = commit
        self._uploads = intake.uploads
        self._base_models = intake.base_models
        self._state_limit_bytes = intake.state_limit_bytes

    async def __call__(self, caller: Caller, parts: AsyncIterator[UploadHeader | StateChunk]) -> Checkpoint:
        """Return the checkpoint.

        The run is named after tenant and upload, so the same upload again is the same checkpoint. An archive that is
        refused once all of it is here is forgotten; the same upload may begin again with another one.

        Raises:
            ScopeMissing: the key may not.
            BaseModelNotFound: adapters of that base model are not taken here.
            InvalidField: the archive is too large, no peft folder of safetensors, or of no adapter of that model.
            QuotaExceeded: too many uploads are not whole yet.
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
        self._base_models.check_known(header.base_model)
        upload = await self._uploads.open(caller.tenant_id, header.upload_id, size_bytes=header.size_bytes)
        try:
            await _receive(upload, header, parts)
            try:
                checkpoint = await self._import(caller, header, upload)
            except InvalidArgument:
                # No other bytes of it would make it right.
                await upload.discard()
                raise
            await upload.discard()
            return checkpoint
        finally:
            await upload.close()

    async def _import(self, caller: Caller, header: UploadHeader, upload: Upload) -> Checkpoint:
        source, said = await upload.open_adapter(header.base_model)
        try:
            await self._base_models.check_fit(source.manifest, said=said)
            adapter = AdapterKey(caller.tenant_id, _run_of(caller.tenant_id, header.upload_id))
            target = CheckpointTarget(header.name, user_metadata=header.user_metadata)
            announcement = Header(adapter.adapter_id, source.manifest, target)
            return await self._commit.copy_checkpoint(adapter, announcement, source)
        finally:
            await source.close()


async def _receive(upload: Upload, header: UploadHeader, parts: AsyncIterator[UploadHeader | StateChunk]) -> None:
    async for part in parts:
        if isinstance(part, UploadHeader):
            raise StreamOutOfOrder('a chunk')
        await upload.add(part)
    if upload.held_bytes < header.size_bytes:
        raise StreamOutOfOrder.at_byte(upload.held_bytes)


def _run_of(tenant_id: str, upload_id: str) -> str:
    return 'up-' + hashlib.blake2s(f'{tenant_id}\0{upload_id}'.encode(), digest_size=10).hexdigest()
