"""Calls to the checkpoint service on behalf of the current caller."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from datetime import timedelta
from typing import Any

import grpc

from services.gateway.catalogue.checkpoint_messages import checkpoint_from_proto
from services.gateway.catalogue.rules import ArchivePart, Checkpoint, UploadOrder
from services.kit.errors import DomainError, ServiceUnreachable, StreamOutOfOrder
from services.kit.rpc.channel import forwarded_metadata
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import duration_to_proto
from services.kit.rpc.status import error_from_call
from services.kit.weights.wire import chunk_to_proto
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2 as messages
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2_grpc
from twinkle.checkpoint_engine import StateChunk, chunk_checksum

_PATIENCE_SECONDS = 30.0
_COPY_SECONDS = 600.0
"""A state of many gigabytes is read and written once."""
_PAGE_SIZE = 1000


class GrpcCheckpoints:
    """Implements `ports.CheckpointKeeper`, and reads and copies. Every verb raises the service's own error."""

    def __init__(self, channel: grpc.aio.Channel | None, *, internal_token: str) -> None:
        """Call over `channel`, a bare one that the caller closes; None: this deployment has no such service."""
        self._stub = None if channel is None else checkpoint_service_pb2_grpc.CheckpointServiceStub(channel)
        self._internal_token = internal_token

    async def delete(self, path: str) -> None:
        """Delete one."""
        await self._call('DeleteCheckpoint', messages.DeleteCheckpointRequest(checkpoint_path=path))

    async def set_ttl(self, path: str, ttl: timedelta | None) -> Checkpoint:
        """Have one deleted after `ttl` from now, or kept, and return it."""
        given = None if ttl is None else duration_to_proto(ttl)
        request = messages.SetCheckpointTtlRequest(checkpoint_path=path, ttl=given)
        return _own(await self._call('SetCheckpointTtl', request))

    async def set_public(self, path: str, *, is_public: bool) -> Checkpoint:
        """Let every tenant read one, or its owner alone, and return it."""
        request = messages.SetCheckpointVisibilityRequest(checkpoint_path=path, is_public=is_public)
        return _own(await self._call('SetCheckpointVisibility', request, is_internal=True))

    async def copy(self, path: str, *, run_id: str, name: str, ttl: timedelta | None) -> Checkpoint:
        """Return a copy of one that the caller may read; see CopyCheckpoint."""
        given = None if ttl is None else duration_to_proto(ttl)
        request = messages.CopyCheckpointRequest(checkpoint_path=path, adapter_id=run_id, name=name, ttl=given)
        return _own(await self._call('CopyCheckpoint', request, is_internal=True, seconds=_COPY_SECONDS))

    async def get(self, path: str) -> Checkpoint:
        """Return one that the caller may read."""
        return _own(await self._call('GetCheckpoint', messages.GetCheckpointRequest(checkpoint_path=path)))

    async def list_of(self, run_id: str) -> Sequence[Checkpoint]:
        """Return all of a run of the caller, newest first; none of one that is not its."""
        found: list[Checkpoint] = []
        token = ''
        while True:
            request = messages.ListCheckpointsRequest(adapter_id=run_id, page_size=_PAGE_SIZE, page_token=token)
            page = await self._call('ListCheckpoints', request)
            found += [checkpoint_from_proto(item, tenant_id=current_caller().tenant_id) for item in page.checkpoints]
            token = page.next_page_token
            if not token:
                return found

    async def archive(self, path: str, *, offset: int) -> AsyncGenerator[ArchivePart, None]:
        """Yield the tar archive of one from a byte on, piece by piece; at its end one that is empty."""
        request = messages.DownloadCheckpointRequest(checkpoint_path=path, offset=offset)
        call = self._need_stub().DownloadCheckpoint(request, metadata=forwarded_metadata(self._internal_token))
        try:
            async for piece in call:
                yield ArchivePart(piece.chunk.data, piece.archive_size_bytes, piece.archive_digest)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, service='checkpoint') from error
        finally:
            call.cancel()

    async def upload(self, order: UploadOrder, pieces: AsyncIterator[bytes], *, offset: int) -> Checkpoint:
        """Return the checkpoint that an archive became; see UploadCheckpoint."""
        header = messages.CheckpointUploadHeader(
            upload_id=order.upload_id, name=order.name, base_model=order.base_model, size_bytes=order.size_bytes
        )
        metadata = forwarded_metadata(self._internal_token)
        try:
            return _own(await self._need_stub().UploadCheckpoint(_parts(header, pieces, offset), metadata=metadata))
        except grpc.aio.AioRpcError as error:
            raise _with_offset(error_from_call(error, service='checkpoint')) from error

    async def _call(
        self, method: str, request: Any, *, is_internal: bool = False, seconds: float = _PATIENCE_SECONDS
    ) -> Any:
        metadata = forwarded_metadata(self._internal_token, is_internal=is_internal)
        try:
            return await getattr(self._need_stub(), method)(request, timeout=seconds, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, service='checkpoint') from error

    def _need_stub(self) -> Any:
        if self._stub is None:
            raise ServiceUnreachable('checkpoint')
        return self._stub


def _own(response: Any) -> Checkpoint:
    return checkpoint_from_proto(response.checkpoint, tenant_id=current_caller().tenant_id)


def _with_offset(error: DomainError) -> DomainError:
    """Return an error that says where an upload stands as one that has it as a number; any other as it is."""
    facts = error.metadata()
    offset = facts.get('offset', '')
    if error.reason != StreamOutOfOrder.reason or not offset.isdecimal():
        return error
    return StreamOutOfOrder(facts.get('expected', ''), offset=int(offset))


async def _parts(
    header: messages.CheckpointUploadHeader, pieces: AsyncIterator[bytes], offset: int
) -> AsyncIterator[messages.UploadCheckpointRequest]:
    yield messages.UploadCheckpointRequest(header=header)
    async for data in pieces:
        yield messages.UploadCheckpointRequest(chunk=chunk_to_proto(StateChunk(offset, data, chunk_checksum(data))))
        offset += len(data)
