"""Servicers of the gRPC services. Each method converts the request, calls the application, and converts the result.

Chunk frames are passed as `StateChunk` values, not as messages; the handlers of `twinkle_services.kit.weights.wire`
serialize and parse them.
"""

# ruff: noqa: N802 (the methods have the contract's names)

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from twinkle.api.checkpoint.v1 import (
    checkpoint_service_pb2,
    checkpoint_service_pb2_grpc,
    version_service_pb2,
    version_service_pb2_grpc,
    weight_stream_service_pb2,
    weight_stream_service_pb2_grpc,
)
from twinkle.checkpoint_engine import StateChunk
from twinkle_services.checkpoint.api import convert, convert_records
from twinkle_services.checkpoint.application.archives import Archives
from twinkle_services.checkpoint.application.checkpoint_watch import CheckpointWatch
from twinkle_services.checkpoint.application.checkpoints import Checkpoints
from twinkle_services.checkpoint.application.publish import Publisher
from twinkle_services.checkpoint.application.uploads import Uploads
from twinkle_services.checkpoint.application.versions import Versions
from twinkle_services.checkpoint.application.weight_feed import WeightFeed
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import adapter_id_from_proto, not_negative, ttl_from_proto
from twinkle_services.kit.weights.wire import frame_to_fetched


class WeightStreamServicer(weight_stream_service_pb2_grpc.WeightStreamServiceServicer):
    """Serves WeightStreamService."""

    def __init__(self, publisher: Publisher, feed: WeightFeed) -> None:
        self._publisher = publisher
        self._feed = feed

    async def Publish(
        self, request_iterator: AsyncIterator[StateChunk | weight_stream_service_pb2.PublishRequest], context: Context
    ) -> weight_stream_service_pb2.PublishResponse:
        record = await self._publisher.publish(current_caller(), convert.frames_from_proto(request_iterator))
        return convert.published_to_proto(record)

    async def Subscribe(
        self, request: weight_stream_service_pb2.SubscribeRequest, context: Context
    ) -> AsyncIterator[Any]:
        subscribe = convert.subscribe_from_proto(request)
        async with aclosing(self._feed.subscribe(current_caller(), subscribe)) as events:
            async for event in events:
                yield convert.subscribed_to_proto(event)

    async def Fetch(self, request: weight_stream_service_pb2.FetchRequest, context: Context) -> AsyncIterator[Any]:
        fetch = convert.fetch_from_proto(request)
        async with aclosing(self._feed.fetch(current_caller(), fetch)) as frames:
            async for frame in frames:
                yield frame_to_fetched(frame)


class VersionServicer(version_service_pb2_grpc.VersionServiceServicer):
    """Serves VersionService."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions

    async def GetVersion(
        self, request: version_service_pb2.GetVersionRequest, context: Context
    ) -> version_service_pb2.GetVersionResponse:
        adapter_id = adapter_id_from_proto(request.adapter_id, 'adapter_id')
        number = not_negative(request.version, 'version')
        version = await self._versions.get(current_caller(), adapter_id, number)
        return version_service_pb2.GetVersionResponse(version=convert_records.version_to_proto(version))

    async def ListVersions(
        self, request: version_service_pb2.ListVersionsRequest, context: Context
    ) -> version_service_pb2.ListVersionsResponse:
        adapter_id, page = convert_records.versions_page_from_proto(request)
        versions, after = await self._versions.list_page(current_caller(), adapter_id, page)
        return convert_records.versions_to_proto(adapter_id, versions, after)

    async def PinVersion(
        self, request: version_service_pb2.PinVersionRequest, context: Context
    ) -> version_service_pb2.PinVersionResponse:
        adapter_id = adapter_id_from_proto(request.adapter_id, 'adapter_id')
        number = convert_records.exact_version(request.version)
        version = await self._versions.pin(current_caller(), adapter_id, number, is_pinned=True)
        return version_service_pb2.PinVersionResponse(version=convert_records.version_to_proto(version))

    async def UnpinVersion(
        self, request: version_service_pb2.UnpinVersionRequest, context: Context
    ) -> version_service_pb2.UnpinVersionResponse:
        adapter_id = adapter_id_from_proto(request.adapter_id, 'adapter_id')
        number = convert_records.exact_version(request.version)
        version = await self._versions.pin(current_caller(), adapter_id, number, is_pinned=False)
        return version_service_pb2.UnpinVersionResponse(version=convert_records.version_to_proto(version))

    async def DeleteVersion(
        self, request: version_service_pb2.DeleteVersionRequest, context: Context
    ) -> version_service_pb2.DeleteVersionResponse:
        adapter_id = adapter_id_from_proto(request.adapter_id, 'adapter_id')
        number = convert_records.exact_version(request.version)
        await self._versions.delete(current_caller(), adapter_id, number)
        return version_service_pb2.DeleteVersionResponse()

    async def DeleteVersions(
        self, request: version_service_pb2.DeleteVersionsRequest, context: Context
    ) -> version_service_pb2.DeleteVersionsResponse:
        adapter_id = adapter_id_from_proto(request.adapter_id, 'adapter_id')
        await self._versions.delete_all(current_caller(), adapter_id)
        return version_service_pb2.DeleteVersionsResponse()


class CheckpointServicer(checkpoint_service_pb2_grpc.CheckpointServiceServicer):
    """Serves CheckpointService."""

    def __init__(self, checkpoints: Checkpoints, archives: Archives, uploads: Uploads, watch: CheckpointWatch) -> None:
        self._checkpoints = checkpoints
        self._archives = archives
        self._uploads = uploads
        self._watch = watch

    async def GetCheckpoint(
        self, request: checkpoint_service_pb2.GetCheckpointRequest, context: Context
    ) -> checkpoint_service_pb2.GetCheckpointResponse:
        key = convert_records.key_from_proto(current_caller(), request.checkpoint_path)
        found = await self._checkpoints.get(key)
        return checkpoint_service_pb2.GetCheckpointResponse(checkpoint=convert_records.checkpoint_to_proto(found))

    async def VerifyCheckpoint(
        self, request: checkpoint_service_pb2.VerifyCheckpointRequest, context: Context
    ) -> checkpoint_service_pb2.VerifyCheckpointResponse:
        key = convert_records.key_from_proto(current_caller(), request.checkpoint_path)
        found = await self._checkpoints.verify(key)
        return checkpoint_service_pb2.VerifyCheckpointResponse(checkpoint=convert_records.checkpoint_to_proto(found))

    async def ListCheckpoints(
        self, request: checkpoint_service_pb2.ListCheckpointsRequest, context: Context
    ) -> checkpoint_service_pb2.ListCheckpointsResponse:
        caller, adapter_id = current_caller(), request.adapter_id
        page = convert_records.checkpoints_page_from_proto(caller, request)
        found, after = await self._checkpoints.list_page(caller, page, adapter_id=adapter_id)
        return convert_records.checkpoints_to_proto(caller, adapter_id, found, after)

    async def DeleteCheckpoint(
        self, request: checkpoint_service_pb2.DeleteCheckpointRequest, context: Context
    ) -> checkpoint_service_pb2.DeleteCheckpointResponse:
        caller = current_caller()
        await self._checkpoints.delete(caller, convert_records.key_from_proto(caller, request.checkpoint_path))
        return checkpoint_service_pb2.DeleteCheckpointResponse()

    async def SetCheckpointTtl(
        self, request: checkpoint_service_pb2.SetCheckpointTtlRequest, context: Context
    ) -> checkpoint_service_pb2.SetCheckpointTtlResponse:
        caller = current_caller()
        key = convert_records.key_from_proto(caller, request.checkpoint_path)
        ttl = ttl_from_proto(request.ttl, 'ttl') if request.HasField('ttl') else None
        changed = await self._checkpoints.set_ttl(caller, key, ttl)
        return checkpoint_service_pb2.SetCheckpointTtlResponse(checkpoint=convert_records.checkpoint_to_proto(changed))

    async def SetCheckpointVisibility(
        self, request: checkpoint_service_pb2.SetCheckpointVisibilityRequest, context: Context
    ) -> checkpoint_service_pb2.SetCheckpointVisibilityResponse:
        caller = current_caller()
        key = convert_records.key_from_proto(caller, request.checkpoint_path)
        changed = await self._checkpoints.set_public(caller, key, is_public=request.is_public)
        message = convert_records.checkpoint_to_proto(changed)
        return checkpoint_service_pb2.SetCheckpointVisibilityResponse(checkpoint=message)

    async def CopyCheckpoint(
        self, request: checkpoint_service_pb2.CopyCheckpointRequest, context: Context
    ) -> checkpoint_service_pb2.CopyCheckpointResponse:
        caller = current_caller()
        key = convert_records.key_from_proto(caller, request.checkpoint_path)
        copy = await self._checkpoints.copy(caller, key, convert_records.copy_from_proto(request))
        return checkpoint_service_pb2.CopyCheckpointResponse(checkpoint=convert_records.checkpoint_to_proto(copy))

    async def DownloadCheckpoint(
        self, request: checkpoint_service_pb2.DownloadCheckpointRequest, context: Context
    ) -> AsyncIterator[checkpoint_service_pb2.DownloadCheckpointResponse]:
        key = convert_records.key_from_proto(current_caller(), request.checkpoint_path)
        offset = not_negative(request.offset, 'offset')
        async with aclosing(self._archives.download(key, offset=offset)) as pieces:
            async for piece in pieces:
                yield convert_records.piece_to_proto(piece)

    async def UploadCheckpoint(
        self, request_iterator: AsyncIterator[checkpoint_service_pb2.UploadCheckpointRequest], context: Context
    ) -> checkpoint_service_pb2.UploadCheckpointResponse:
        parts = convert_records.upload_from_proto(request_iterator)
        created = await self._uploads.receive(current_caller(), parts)
        return checkpoint_service_pb2.UploadCheckpointResponse(checkpoint=convert_records.checkpoint_to_proto(created))

    async def WatchCheckpoints(
        self, request: checkpoint_service_pb2.WatchCheckpointsRequest, context: Context
    ) -> AsyncIterator[checkpoint_service_pb2.WatchCheckpointsResponse]:
        async with aclosing(self._watch.watch(current_caller(), request.resume_token)) as events:
            async for event in events:
                yield convert_records.event_to_proto(event)
