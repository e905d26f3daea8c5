"""Converts the messages of the weight stream, and checks their fields; `WeightFeed` checks checkpoint paths."""

from collections.abc import AsyncIterator

from twinkle.api.checkpoint.v1 import weight_stream_service_pb2 as wire
from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle.checkpoint_engine import StateChunk, WeightManifest
from twinkle_services.checkpoint.api.convert_records import checkpoint_to_proto, version_to_proto
from twinkle_services.checkpoint.application.weight_feed import (
    CheckpointRef,
    FetchRequest,
    SubscribeRequest,
    Synced,
    VersionRef,
)
from twinkle_services.checkpoint.domain import Checkpoint, Record
from twinkle_services.kit.errors import InvalidField, NotBuiltYet
from twinkle_services.kit.rpc.fields import (
    MAX_ID_LENGTH,
    adapter_id_from_proto,
    labels_from_proto,
    name_from_proto,
    not_negative,
    text_from_proto,
    ttl_from_proto,
)
from twinkle_services.kit.weights import CheckpointTarget, Encoding, Frame, Header, SegmentRef, VersionTarget
from twinkle_services.kit.weights.wire import (
    encoding_from_proto,
    fetch_options_from_proto,
    frame_of,
    frame_to_subscribed,
    manifest_from_proto,
    receiver_options_from_proto,
    segment_from_proto,
)


async def frames_from_proto(requests: AsyncIterator[StateChunk | wire.PublishRequest]) -> AsyncIterator[Frame]:
    """Yield the frames of a Publish stream as they arrive.

    Raises:
        InvalidField: A frame is empty or malformed.
        NotBuiltYet: The state is sent as a delta or over a device transport, which is not supported.
    """
    async for request in requests:
        frame = frame_of(request)
        yield _header_from_proto(frame) if isinstance(frame, weights_pb2.FrameHeader) else frame


def published_to_proto(record: Record) -> wire.PublishResponse:
    if isinstance(record, Checkpoint):
        return wire.PublishResponse(checkpoint=checkpoint_to_proto(record))
    return wire.PublishResponse(version=version_to_proto(record))


def subscribe_from_proto(request: wire.SubscribeRequest) -> SubscribeRequest:
    """Convert a Subscribe request.

    Raises:
        InvalidField: A field is malformed or negative.
    """
    receiver = receiver_options_from_proto(request)
    return SubscribeRequest(
        adapter_id_from_proto(request.adapter_id, 'adapter_id'),
        held_version=not_negative(request.held_version, 'held_version'),
        resume_version=not_negative(request.resume_version, 'resume_version'),
        is_single=request.is_single,
        receiver=receiver,
    )


def subscribed_to_proto(event: Frame | Synced) -> StateChunk | wire.SubscribeResponse:
    return wire.SubscribeResponse(is_synced=True) if isinstance(event, Synced) else frame_to_subscribed(event)


def fetch_from_proto(request: wire.FetchRequest) -> FetchRequest:
    """Convert a Fetch request.

    Raises:
        InvalidField: The request names no state, or a field is malformed or negative.
    """
    return FetchRequest(
        _reference_from_proto(request),
        is_adapter_only=request.is_adapter_only,
        receiver=fetch_options_from_proto(request),
    )


def _reference_from_proto(request: wire.FetchRequest) -> VersionRef | CheckpointRef:
    kind = request.WhichOneof('state')
    if kind == 'version':
        adapter_id = adapter_id_from_proto(request.version.adapter_id, 'version.adapter_id')
        return VersionRef(adapter_id, not_negative(request.version.version, 'version.version'))
    if kind == 'checkpoint_path':
        return CheckpointRef(request.checkpoint_path)
    raise InvalidField('state', 'must name a version or a checkpoint')


def _header_from_proto(header: weights_pb2.FrameHeader) -> Header:
    path = 'frame.header'
    encoding = encoding_from_proto(header.encoding, f'{path}.encoding')
    if encoding is Encoding.DELTA:
        raise NotBuiltYet('Publish of a delta')
    if encoding is Encoding.DEVICE:
        raise NotBuiltYet('Publish over a device transport')
    for name in ('resume_offset', 'base_version'):
        if getattr(header, name):
            raise InvalidField(f'{path}.{name}', 'must be 0: Publish receives complete states from byte 0 on')
    manifest = manifest_from_proto(header.manifest, f'{path}.manifest')
    size_bytes = 0 if encoding is Encoding.SHARED_MEMORY else manifest.size_bytes
    if header.encoded_size_bytes not in (0, size_bytes):
        problem = f'is {header.encoded_size_bytes}, must be {size_bytes} or 0'
        raise InvalidField(f'{path}.encoded_size_bytes', problem)
    return Header(
        adapter_id_from_proto(header.adapter_id, f'{path}.adapter_id'),
        manifest,
        _target_from_proto(header, manifest, path),
        encoding=encoding,
        segment=_segment_from_proto(header, manifest, path) if encoding is Encoding.SHARED_MEMORY else None,
    )


def _segment_from_proto(header: weights_pb2.FrameHeader, manifest: WeightManifest, path: str) -> SegmentRef:
    if not header.HasField('segment'):
        raise InvalidField(f'{path}.segment', 'must be set for shared memory')
    if header.segment.size_bytes != manifest.size_bytes:
        problem = f'is {header.segment.size_bytes}, must be {manifest.size_bytes} as in the manifest'
        raise InvalidField(f'{path}.segment.size_bytes', problem)
    return segment_from_proto(header.segment)


def _target_from_proto(
    header: weights_pb2.FrameHeader, manifest: WeightManifest, path: str
) -> VersionTarget | CheckpointTarget:
    kind = header.WhichOneof('target')
    if kind == 'version':
        if header.version.version < 1:
            raise InvalidField(f'{path}.version.version', f'must be at least 1, got {header.version.version}')
        if manifest.is_trainer_included:
            raise InvalidField(
                f'{path}.manifest.tensors', 'must contain only adapter weights if the target is a version'
            )
        return VersionTarget(header.version.version, header.version.is_pinned)
    if kind == 'checkpoint':
        target = header.checkpoint
        return CheckpointTarget(
            name_from_proto(target.name, f'{path}.checkpoint.name'),
            is_overwrite_allowed=target.is_overwrite_allowed,
            step_count=not_negative(target.step_count, f'{path}.checkpoint.step_count'),
            ttl=ttl_from_proto(target.ttl, f'{path}.checkpoint.ttl') if target.HasField('ttl') else None,
            request_id=text_from_proto(target.request_id, f'{path}.checkpoint.request_id', limit=MAX_ID_LENGTH),
            user_metadata=labels_from_proto(target.user_metadata, f'{path}.checkpoint.user_metadata'),
        )
    raise InvalidField(path, 'must name a target: version or checkpoint')
