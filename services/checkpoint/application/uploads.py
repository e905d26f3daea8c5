"""Uploads of PEFT folders: a tar archive made elsewhere becomes a checkpoint of a new run."""

import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace

from twinkle_services.checkpoint.application.registry import Registry
from twinkle_services.checkpoint.domain import AdapterKey, Checkpoint
from twinkle_services.checkpoint.ports import BaseModels, Upload, UploadStore
from twinkle_services.kit.caller import Caller, require_scope
from twinkle_services.kit.errors import InvalidArgument, InvalidField, StreamOutOfOrder
from twinkle_services.kit.upload_folder import UploadChunk
from twinkle_services.kit.upload_folder import UploadHeader as StoredHeader
from twinkle_services.kit.weights import CheckpointTarget, Header


@dataclass(frozen=True)
class UploadHeader:
    """Announces an upload."""

    upload_id: str
    name: str
    base_model: str
    size_bytes: int
    """Size of the tar archive as it is sent, possibly compressed."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels that the caller attaches to the checkpoint."""
    sha256: str = ''
    """SHA-256 digest of the archive as it is sent, hexadecimal; empty if the caller sends none."""


class Uploads:
    """Receives archives, each in one or several streams."""

    def __init__(
        self, registry: Registry, store: UploadStore, base_models: BaseModels, *, state_limit_bytes: int
    ) -> None:
        """Create the receiver of uploads.

        Args:
            registry: Registry in which uploads become checkpoints.
            store: Stores unfinished archives.
            base_models: Base models that uploaded adapters must fit.
            state_limit_bytes: Maximum size of an archive as it is sent, in bytes.
        """
        self._registry = registry
        self._store = store
        self._base_models = base_models
        self._state_limit_bytes = state_limit_bytes

    async def receive(self, caller: Caller, parts: AsyncIterator[UploadHeader | UploadChunk]) -> Checkpoint:
        """Receive an upload and return the checkpoint created from it.

        The run's id is derived from tenant and upload id, so that a repeated upload yields the same checkpoint. A
        complete archive that is invalid is discarded. The same upload may then start again with a different archive.

        Raises:
            ScopeMissing: The API key lacks the scope `train`.
            BaseModelNotFound: Adapters of that base model are not accepted.
            InvalidField: The archive is too large, is not a PEFT folder of safetensors, or does not fit the base model,
                or an upload without a digest repeats an offset with other bytes.
            QuotaExceeded: The tenant has too many unfinished uploads, or their total size is too large.
            ChunkCorrupt: A chunk does not match its checksum.
            DigestMismatch: The complete archive does not match the header's digest. The upload was removed.
            StreamOutOfOrder: The header is missing or repeated, a chunk leaves a gap, or the stream ended before the
                last byte.
            InUse: Another stream is sending this upload.
            CheckpointExists, CheckpointDamaged: This upload has already created a checkpoint, which is different or
                damaged.
            ServiceUnreachable: The shapes of the base model could not be read.
            DiskFull, StoreUnavailable: The disk has too little space, or cannot be used at the moment.
        """
        require_scope(caller, 'train')
        header = await anext(parts, None)
        if not isinstance(header, UploadHeader):
            raise StreamOutOfOrder('a header')
        if header.size_bytes > self._state_limit_bytes:
            problem = f'is {header.size_bytes}, must be at most {self._state_limit_bytes}'
            raise InvalidField('header.size_bytes', problem)
        header = replace(header, base_model=self._base_models.known_name(header.base_model))
        announced = StoredHeader(upload_id=header.upload_id, size_bytes=header.size_bytes, sha256=header.sha256)
        upload = await self._store.open(caller.tenant_id, announced)
        try:
            await _receive(upload, header, parts)
            try:
                checkpoint = await self._import(caller, header, upload)
            except InvalidArgument:
                # The archive is complete, so further chunks cannot make it valid.
                await upload.discard()
                raise
            await upload.discard()
            return checkpoint
        finally:
            await upload.close()

    async def _import(self, caller: Caller, header: UploadHeader, upload: Upload) -> Checkpoint:
        source, stated_base_model = await upload.open_adapter(header.base_model)
        try:
            await self._base_models.check_fit(source.manifest, stated_base_model=stated_base_model)
            adapter = AdapterKey(caller.tenant_id, _run_id(caller.tenant_id, header.upload_id))
            target = CheckpointTarget(header.name, user_metadata=header.user_metadata)
            return await self._registry.copy_in(adapter, Header(adapter.adapter_id, source.manifest, target), source)
        finally:
            await source.close()


async def _receive(upload: Upload, header: UploadHeader, parts: AsyncIterator[UploadHeader | UploadChunk]) -> None:
    async for part in parts:
        if isinstance(part, UploadHeader):
            raise StreamOutOfOrder('a chunk')
        await upload.add(part)
    if upload.received_bytes < header.size_bytes:
        raise StreamOutOfOrder.at_byte(upload.received_bytes)
    await upload.verify()


def _run_id(tenant_id: str, upload_id: str) -> str:
    return 'up-' + hashlib.blake2s(f'{tenant_id}\0{upload_id}'.encode(), digest_size=10).hexdigest()
