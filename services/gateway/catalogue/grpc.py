"""Client of the checkpoint service, and the feeds of adapters and checkpoints that the catalogue copies."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, timedelta
from typing import Any

import grpc

from twinkle.api.checkpoint.v1 import checkpoint_pb2, checkpoint_service_pb2_grpc
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2 as messages
from twinkle.api.model.v1 import adapter_pb2, adapter_service_pb2, adapter_service_pb2_grpc
from twinkle.checkpoint_engine import StateChunk, chunk_checksum
from twinkle_services.gateway.catalogue.ports import Feed
from twinkle_services.gateway.catalogue.rules import (
    ArchivePart,
    CatalogueEvent,
    Checkpoint,
    EntryChanged,
    EntryDamaged,
    EntryDeleted,
    Run,
    SnapshotComplete,
    UploadRequest,
)
from twinkle_services.kit.errors import DomainError, ServiceUnreachable, StreamOutOfOrder
from twinkle_services.kit.rpc.channel import call_errors, forwarded_metadata
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import duration_to_proto
from twinkle_services.kit.weights.wire import chunk_to_proto

_TIMEOUT_SECONDS = 30.0
_COPY_SECONDS = 600.0
"""Timeout of a copy, which reads and writes a state of many gigabytes."""
_PAGE_SIZE = 1000


class GrpcCheckpoints:
    """Calls the checkpoint service on behalf of the current caller. A failed call raises a DomainError.

    Args:
        channel: channel that adds no credentials and is closed by the caller; None if the service is not deployed.
        internal_token: proves the gateway's identity to the service.
        check_storage: raises QuotaExceeded for a tenant without free storage, before a copy or an upload.
    """

    def __init__(
        self, channel: grpc.aio.Channel | None, *, internal_token: str, check_storage: Callable[[str], Awaitable[None]]
    ) -> None:
        self._stub = None if channel is None else checkpoint_service_pb2_grpc.CheckpointServiceStub(channel)
        self._internal_token = internal_token
        self._check_storage = check_storage

    async def delete(self, path: str) -> None:
        """Delete a checkpoint."""
        request = messages.DeleteCheckpointRequest(checkpoint_path=path)
        await self._call(self._require_stub().DeleteCheckpoint, request)

    async def set_ttl(self, path: str, ttl: timedelta | None) -> Checkpoint:
        """Set a checkpoint to expire `ttl` from now; None removes the expiry."""
        request = messages.SetCheckpointTtlRequest(checkpoint_path=path, ttl=_ttl_to_proto(ttl))
        return _checkpoint_of(await self._call(self._require_stub().SetCheckpointTtl, request))

    async def set_public(self, path: str, *, is_public: bool) -> Checkpoint:
        """Make a checkpoint readable by every tenant, or by its own tenant only."""
        request = messages.SetCheckpointVisibilityRequest(checkpoint_path=path, is_public=is_public)
        return _checkpoint_of(await self._call(self._require_stub().SetCheckpointVisibility, request, is_internal=True))

    async def copy(self, path: str, *, run_id: str, name: str, ttl: timedelta | None) -> Checkpoint:
        """Copy a checkpoint that the caller may read; repeating the call returns the same copy."""
        await self._check_storage(current_caller().tenant_id)
        ttl_message = _ttl_to_proto(ttl)
        request = messages.CopyCheckpointRequest(checkpoint_path=path, adapter_id=run_id, name=name, ttl=ttl_message)
        copy = self._require_stub().CopyCheckpoint
        return _checkpoint_of(await self._call(copy, request, is_internal=True, seconds=_COPY_SECONDS))

    async def get(self, path: str) -> Checkpoint:
        """Return a checkpoint that the caller may read."""
        request = messages.GetCheckpointRequest(checkpoint_path=path)
        return _checkpoint_of(await self._call(self._require_stub().GetCheckpoint, request))

    async def list_of(self, run_id: str) -> Sequence[Checkpoint]:
        """Return all checkpoints of a run, newest first; an empty list for a run of another tenant."""
        found: list[Checkpoint] = []
        request = messages.ListCheckpointsRequest(adapter_id=run_id, page_size=_PAGE_SIZE)
        while True:
            page = await self._call(self._require_stub().ListCheckpoints, request)
            found += [checkpoint_from_proto(item, tenant_id=current_caller().tenant_id) for item in page.checkpoints]
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    async def archive(self, path: str, *, offset: int) -> AsyncGenerator[ArchivePart, None]:
        """Yield the tar archive of a checkpoint from byte `offset` on, or one empty part if `offset` is its size."""
        request = messages.DownloadCheckpointRequest(checkpoint_path=path, offset=offset)
        call = self._require_stub().DownloadCheckpoint(request, metadata=forwarded_metadata(self._internal_token))
        try:
            with call_errors('checkpoint'):
                async for part in call:
                    yield ArchivePart(part.chunk.data, part.archive_size_bytes, part.archive_digest)
        finally:
            call.cancel()

    async def upload(self, request: UploadRequest, parts: AsyncIterator[bytes], *, offset: int) -> Checkpoint:
        """Upload an archive, or resume its upload with the bytes from `offset` on; return the new checkpoint.

        Raises:
            StreamOutOfOrder: the archive is incomplete; `offset` of the error is the number of bytes received.
        """
        await self._check_storage(current_caller().tenant_id)
        header = messages.CheckpointUploadHeader(
            upload_id=request.upload_id, name=request.name, base_model=request.base_model, size_bytes=request.size_bytes
        )
        metadata = forwarded_metadata(self._internal_token)
        try:
            with call_errors('checkpoint'):
                call = self._require_stub().UploadCheckpoint(_upload(header, parts, offset), metadata=metadata)
                return _checkpoint_of(await call)
        except DomainError as error:
            if (found := _with_offset(error)) is error:
                raise
            raise found from error

    async def _call(
        self, method: Any, request: Any, *, is_internal: bool = False, seconds: float = _TIMEOUT_SECONDS
    ) -> Any:
        metadata = forwarded_metadata(self._internal_token, is_internal=is_internal)
        with call_errors('checkpoint'):
            return await method(request, timeout=seconds, metadata=metadata)

    def _require_stub(self) -> checkpoint_service_pb2_grpc.CheckpointServiceStub:
        if self._stub is None:
            raise ServiceUnreachable('checkpoint')
        return self._stub


def adapter_feed(channel: grpc.aio.Channel, *, is_reports_only: bool = False) -> Feed:
    """Return the feed of the adapters of all tenants at a model service; `channel` carries the gateway's identity.

    With `is_reports_only`, responses contain the metrics of adapters, and only changes that add a report are sent.
    """
    stub = adapter_service_pb2_grpc.AdapterServiceStub(channel)

    def follow(resume_token: str) -> AsyncIterator[CatalogueEvent[Any]]:
        request = adapter_service_pb2.WatchAdaptersRequest(resume_token=resume_token, is_reports_only=is_reports_only)
        return entry_events(stub.WatchAdapters(request), id_field='adapter_id', service='model')

    return follow


def checkpoint_feed(channel: grpc.aio.Channel) -> Feed:
    """Return the feed of the checkpoints of all tenants; `channel` carries the gateway's identity."""
    stub = checkpoint_service_pb2_grpc.CheckpointServiceStub(channel)

    def follow(resume_token: str) -> AsyncIterator[CatalogueEvent[Any]]:
        call = stub.WatchCheckpoints(messages.WatchCheckpointsRequest(resume_token=resume_token))
        return entry_events(call, id_field='checkpoint_id', service='checkpoint')

    return follow


async def entry_events(call: Any, *, id_field: str, service: str) -> AsyncIterator[CatalogueEvent[Any]]:
    """Yield the events of a WatchAdapters or WatchCheckpoints call, and cancel the call at the end.

    `id_field` is the name of the field that contains the id of an adapter or a checkpoint.

    Raises:
        DomainError: the call failed, for example because the service is unreachable or refuses the resume token.
    """
    try:
        with call_errors(service):
            async for message in call:
                if (event := _event_of(message, id_field)) is not None:
                    yield event
    finally:
        call.cancel()


def _event_of(message: Any, id_field: str) -> CatalogueEvent[Any] | None:
    """Return the event, or None for a kind that only newer services send."""
    match message.WhichOneof('event'):
        case 'adapter' | 'checkpoint' as kind:
            key = message.tenant_id, getattr(getattr(message, kind), id_field)
            return EntryChanged(key=key, entry=message, resume_token=message.resume_token)
        case 'deletion':
            key = message.tenant_id, getattr(message.deletion, id_field)
            return EntryDeleted(key=key, resume_token=message.resume_token)
        case 'damaged_adapter_id' | 'damaged_checkpoint_id' as field:
            return EntryDamaged(key=(message.tenant_id, getattr(message, field)))
        case 'is_synced':
            return SnapshotComplete(resume_token=message.resume_token)
        case _:
            return None


def run_from_proto(adapter: adapter_pb2.Adapter, *, tenant_id: str) -> Run:
    """Return the run of an adapter in training."""
    return Run(
        run_id=adapter.adapter_id,
        tenant_id=tenant_id,
        base_model=adapter.base_model,
        lora_rank=adapter.lora_config.lora_rank,
        step_count=adapter.step_count,
        version=adapter.version,
        user_metadata=dict(adapter.user_metadata),
        is_active=True,
        create_time=adapter.create_time.ToDatetime(tzinfo=UTC),
        update_time=adapter.update_time.ToDatetime(tzinfo=UTC),
        session_id=adapter.session_id,
    )


def checkpoint_from_proto(message: checkpoint_pb2.Checkpoint, *, tenant_id: str) -> Checkpoint:
    """Return the checkpoint that a message of the checkpoint service describes."""
    return Checkpoint(
        checkpoint_id=message.checkpoint_id,
        tenant_id=tenant_id,
        run_id=message.adapter_id,
        name=message.name,
        path=message.path,
        base_model=message.base_model,
        is_optimizer_included=message.is_optimizer_included,
        size_bytes=message.size_bytes,
        step_count=message.step_count,
        digest=message.digest,
        folder=message.folder,
        create_time=message.create_time.ToDatetime(tzinfo=UTC),
        expire_time=message.expire_time.ToDatetime(tzinfo=UTC) if message.HasField('expire_time') else None,
        is_public=message.is_public,
        user_metadata=dict(message.user_metadata),
        lora_rank=message.lora_rank,
    )


def run_of(message: adapter_service_pb2.WatchAdaptersResponse) -> Run:
    """Return the run in a response that contains an adapter."""
    return run_from_proto(message.adapter, tenant_id=message.tenant_id)


def listed_checkpoint_of(message: messages.WatchCheckpointsResponse) -> Checkpoint:
    """Return the checkpoint in a response that contains one."""
    return checkpoint_from_proto(message.checkpoint, tenant_id=message.tenant_id)


def _checkpoint_of(response: Any) -> Checkpoint:
    return checkpoint_from_proto(response.checkpoint, tenant_id=current_caller().tenant_id)


def _ttl_to_proto(ttl: timedelta | None) -> Any:
    return None if ttl is None else duration_to_proto(ttl)


def _with_offset(error: DomainError) -> DomainError:
    """Return the error of an incomplete upload with its offset as a number, and any other error unchanged."""
    facts = error.metadata()
    offset = facts.get('offset', '')
    if error.reason != StreamOutOfOrder.reason or not offset.isdecimal():
        return error
    return StreamOutOfOrder(facts.get('expected', ''), offset=int(offset))


async def _upload(
    header: messages.CheckpointUploadHeader, parts: AsyncIterator[bytes], offset: int
) -> AsyncIterator[messages.UploadCheckpointRequest]:
    yield messages.UploadCheckpointRequest(header=header)
    async for data in parts:
        yield messages.UploadCheckpointRequest(chunk=chunk_to_proto(StateChunk(offset, data, chunk_checksum(data))))
        offset += len(data)
