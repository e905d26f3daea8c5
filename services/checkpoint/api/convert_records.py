"""Converts the messages of versions, checkpoints, uploads and events, and checks all their fields."""

from collections.abc import AsyncIterator, Sequence

from twinkle.api.checkpoint.v1 import checkpoint_pb2, checkpoint_service_pb2, version_service_pb2, weights_pb2
from twinkle_services.checkpoint.application.archives import ArchivePiece
from twinkle_services.checkpoint.application.checkpoint_watch import CheckpointEvent
from twinkle_services.checkpoint.application.checkpoints import CopyRequest
from twinkle_services.checkpoint.application.uploads import UploadHeader
from twinkle_services.checkpoint.domain import AdapterVersion, Checkpoint, CheckpointKey, parse_checkpoint_path
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import CheckpointNotFound, InvalidField
from twinkle_services.kit.paging import Page, SortKey, page_token_after, parse_page
from twinkle_services.kit.rpc.fields import (
    adapter_id_from_proto,
    base_model_from_proto,
    labels_from_proto,
    name_from_proto,
    timestamp_to_proto,
    ttl_from_proto,
)
from twinkle_services.kit.rpc.uploads import sha256_from_proto, upload_chunk_from_proto
from twinkle_services.kit.upload_folder import UploadChunk
from twinkle_services.kit.weights.wire import chunk_to_proto


def version_to_proto(version: AdapterVersion) -> weights_pb2.AdapterVersion:
    return weights_pb2.AdapterVersion(
        adapter_id=version.adapter.adapter_id,
        version=version.version,
        digest=version.digest,
        size_bytes=version.size_bytes,
        is_pinned=version.is_pinned,
        create_time=timestamp_to_proto(version.create_time),
    )


def checkpoint_to_proto(checkpoint: Checkpoint) -> checkpoint_pb2.Checkpoint:
    return checkpoint_pb2.Checkpoint(
        checkpoint_id=checkpoint.key.checkpoint_id,
        adapter_id=checkpoint.key.adapter.adapter_id,
        name=checkpoint.key.name,
        path=checkpoint.key.path,
        base_model=checkpoint.base_model,
        is_optimizer_included=checkpoint.is_optimizer_included,
        size_bytes=checkpoint.size_bytes,
        step_count=checkpoint.step_count,
        digest=checkpoint.digest,
        folder=checkpoint.folder,
        create_time=timestamp_to_proto(checkpoint.create_time),
        expire_time=None if checkpoint.expire_time is None else timestamp_to_proto(checkpoint.expire_time),
        is_public=checkpoint.is_public,
        user_metadata=checkpoint.user_metadata,
        lora_rank=checkpoint.lora_rank,
        target_modules=checkpoint.target_modules,
    )


def key_from_proto(caller: Caller, checkpoint_path: str) -> CheckpointKey:
    """Return the key of a checkpoint path or id, in the caller's tenant.

    Raises:
        InvalidField: The path is empty.
        CheckpointNotFound: The path is malformed, and therefore no checkpoint has it.
    """
    if not checkpoint_path:
        raise InvalidField('checkpoint_path', 'must be "twinkle://<run>/weights/<name>" or a checkpoint id')
    key = parse_checkpoint_path(caller.tenant_id, checkpoint_path)
    if key is None:
        raise CheckpointNotFound(checkpoint_path)
    return key


def copy_from_proto(request: checkpoint_service_pb2.CopyCheckpointRequest) -> CopyRequest:
    """Convert a CopyCheckpoint request.

    Raises:
        InvalidField: A field is malformed.
    """
    return CopyRequest(
        adapter_id=adapter_id_from_proto(request.adapter_id, 'adapter_id'),
        name=name_from_proto(request.name, 'name'),
        ttl=ttl_from_proto(request.ttl, 'ttl') if request.HasField('ttl') else None,
    )


def exact_version(version: int) -> int:
    """Return `version` after checking that it is the number of one version; 0 for the newest is not accepted.

    Raises:
        InvalidField: The number is below 1.
    """
    if version < 1:
        raise InvalidField('version', f'must be at least 1, got {version}')
    return version


def versions_page_from_proto(request: version_service_pb2.ListVersionsRequest) -> tuple[str, Page]:
    """Return the adapter and the page of a ListVersions request.

    Raises:
        InvalidField, InvalidPageToken: A field is malformed.
    """
    adapter_id = adapter_id_from_proto(request.adapter_id, 'adapter_id')
    query = _versions_query(adapter_id)
    return adapter_id, parse_page(request.page_size, request.page_token, query=query, key_types=(int,))


def versions_to_proto(
    adapter_id: str, versions: Sequence[AdapterVersion], after: SortKey | None
) -> version_service_pb2.ListVersionsResponse:
    token = page_token_after(after, query=_versions_query(adapter_id))
    return version_service_pb2.ListVersionsResponse(
        versions=[version_to_proto(version) for version in versions], next_page_token=token
    )


def checkpoints_page_from_proto(caller: Caller, request: checkpoint_service_pb2.ListCheckpointsRequest) -> Page:
    """Return the page of a ListCheckpoints request.

    Raises:
        InvalidField, InvalidPageToken: A field is malformed.
    """
    if request.adapter_id:
        adapter_id_from_proto(request.adapter_id, 'adapter_id')
    query = _checkpoints_query(caller, request.adapter_id)
    return parse_page(request.page_size, request.page_token, query=query, key_types=(str, str))


def checkpoints_to_proto(
    caller: Caller, adapter_id: str, checkpoints: Sequence[Checkpoint], after: SortKey | None
) -> checkpoint_service_pb2.ListCheckpointsResponse:
    token = page_token_after(after, query=_checkpoints_query(caller, adapter_id))
    return checkpoint_service_pb2.ListCheckpointsResponse(
        checkpoints=[checkpoint_to_proto(checkpoint) for checkpoint in checkpoints], next_page_token=token
    )


def piece_to_proto(piece: ArchivePiece) -> checkpoint_service_pb2.DownloadCheckpointResponse:
    return checkpoint_service_pb2.DownloadCheckpointResponse(
        chunk=chunk_to_proto(piece.chunk), archive_size_bytes=piece.archive_size_bytes, archive_digest=piece.digest
    )


async def upload_from_proto(
    requests: AsyncIterator[checkpoint_service_pb2.UploadCheckpointRequest],
) -> AsyncIterator[UploadHeader | UploadChunk]:
    """Yield the parts of an UploadCheckpoint stream as they arrive.

    Raises:
        InvalidField: A part is empty or malformed.
    """
    async for request in requests:
        kind = request.WhichOneof('part')
        if kind is None:
            raise InvalidField('part', 'must contain a header or a chunk')
        yield _upload_header(request.header) if kind == 'header' else upload_chunk_from_proto(request.chunk)


def event_to_proto(event: CheckpointEvent) -> checkpoint_service_pb2.WatchCheckpointsResponse:
    response = checkpoint_service_pb2.WatchCheckpointsResponse(resume_token=event.resume_token)
    if event.key is None:
        response.is_synced = True
        return response
    response.tenant_id = event.key.adapter.tenant_id
    if event.is_damaged:
        response.damaged_checkpoint_id = event.key.checkpoint_id
    elif event.checkpoint is None:
        response.deletion.checkpoint_id = event.key.checkpoint_id
    else:
        response.checkpoint.CopyFrom(checkpoint_to_proto(event.checkpoint))
    return response


def _upload_header(header: checkpoint_service_pb2.CheckpointUploadHeader) -> UploadHeader:
    if header.size_bytes < 1:
        raise InvalidField('header.size_bytes', f'must be at least 1, got {header.size_bytes}')
    return UploadHeader(
        upload_id=name_from_proto(header.upload_id, 'header.upload_id'),
        name=name_from_proto(header.name, 'header.name'),
        base_model=base_model_from_proto(header.base_model, 'header.base_model'),
        size_bytes=header.size_bytes,
        user_metadata=labels_from_proto(header.user_metadata, 'header.user_metadata'),
        sha256=sha256_from_proto(header.sha256, 'header.sha256'),
    )


def _versions_query(adapter_id: str) -> str:
    return f'ListVersions {adapter_id}'


def _checkpoints_query(caller: Caller, adapter_id: str) -> str:
    return f'ListCheckpoints {caller.tenant_id} {adapter_id}'
