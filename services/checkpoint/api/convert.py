"""Messages of the stream of weights to values and back, with every check of their fields."""

from collections.abc import AsyncIterator

from services.checkpoint.api.convert_records import checkpoint_to_proto, version_to_proto
from services.checkpoint.application.fetch import CheckpointRef, VersionRef
from services.checkpoint.application.frames import CheckpointTarget, Commit, Frame, Header, VersionTarget
from services.checkpoint.application.subscribe import Subscription, Synced
from services.checkpoint.domain import Checkpoint, Record
from services.kit.errors import InvalidField, NotBuiltYet
from services.kit.rpc.fields import MAX_ID_LENGTH, name_from_proto, not_negative, text_from_proto, ttl_from_proto
from services.kit.rpc.weights import chunk_from_proto, chunk_to_proto, manifest_from_proto, manifest_to_proto
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2 as wire
from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle.checkpoint_engine import StateChunk


async def frames_from_proto(requests: AsyncIterator[wire.PublishRequest]) -> AsyncIterator[Frame]:
    """Yield the frames of a publish as they come.

    Raises:
        InvalidField: a frame is empty or malformed.
    """
    async for request in requests:
        yield frame_from_proto(request.frame)


def frame_from_proto(frame: weights_pb2.WeightFrame) -> Frame:
    """Return one frame of a publish.

    Raises:
        InvalidField: it is empty or malformed.
        NotBuiltYet: it is a delta.
    """
    kind = frame.WhichOneof('frame')
    if kind == 'header':
        return _header_from_proto(frame.header)
    if kind == 'chunk':
        return chunk_from_proto(frame.chunk)
    if kind == 'commit':
        return Commit(frame.commit.digest)
    raise InvalidField('frame', 'must hold a header, a chunk or a commit')


def frame_to_proto(frame: Frame) -> weights_pb2.WeightFrame:
    """Return a frame that is sent, as a message."""
    if isinstance(frame, StateChunk):
        return weights_pb2.WeightFrame(chunk=chunk_to_proto(frame))
    if isinstance(frame, Commit):
        return weights_pb2.WeightFrame(commit=weights_pb2.FrameCommit(digest=frame.digest))
    return weights_pb2.WeightFrame(header=_header_to_proto(frame))


def published_to_proto(record: Record) -> wire.PublishResponse:
    """Return what a state became."""
    if isinstance(record, Checkpoint):
        return wire.PublishResponse(checkpoint=checkpoint_to_proto(record))
    return wire.PublishResponse(version=version_to_proto(record))


def subscription_from_proto(request: wire.SubscribeRequest) -> Subscription:
    """Return what a subscriber asks for.

    Raises:
        InvalidField: a field is malformed or negative.
    """
    return Subscription(
        name_from_proto(request.adapter_id, 'adapter_id'),
        held_version=not_negative(request.held_version, 'held_version'),
        resume_version=not_negative(request.resume_version, 'resume_version'),
        resume_offset=not_negative(request.resume_offset, 'resume_offset'),
        is_single=request.is_single,
    )


def subscribed_to_proto(event: Frame | Synced) -> wire.SubscribeResponse:
    """Return what a subscriber is told."""
    if isinstance(event, Synced):
        return wire.SubscribeResponse(is_synced=True)
    return wire.SubscribeResponse(frame=frame_to_proto(event))


def reference_from_proto(request: wire.FetchRequest) -> VersionRef | CheckpointRef:
    """Return which state is asked for.

    Raises:
        InvalidField: none is, or a field is malformed.
    """
    kind = request.WhichOneof('state')
    if kind == 'version':
        adapter_id = name_from_proto(request.version.adapter_id, 'version.adapter_id')
        return VersionRef(adapter_id, not_negative(request.version.version, 'version.version'))
    if kind == 'checkpoint_path':
        return CheckpointRef(request.checkpoint_path)
    raise InvalidField('state', 'must name a checkpoint or a version')


def _header_from_proto(header: weights_pb2.FrameHeader) -> Header:
    path = 'frame.header'
    if header.encoding == weights_pb2.FRAME_ENCODING_DELTA_XOR_ZSTD:
        raise NotBuiltYet('Publish of a delta')
    if header.encoding != weights_pb2.FRAME_ENCODING_WHOLE:
        raise InvalidField(f'{path}.encoding', 'must be FRAME_ENCODING_WHOLE')
    if header.resume_offset:
        raise InvalidField(f'{path}.resume_offset', 'must be 0: a cut publish begins again')
    if header.base_version:
        raise InvalidField(f'{path}.base_version', 'must be 0: only a delta has one')
    manifest = manifest_from_proto(header.manifest, f'{path}.manifest')
    if header.encoded_size_bytes not in (0, manifest.size_bytes):
        problem = f'is {header.encoded_size_bytes}, the manifest says {manifest.size_bytes}'
        raise InvalidField(f'{path}.encoded_size_bytes', problem)
    return Header(name_from_proto(header.adapter_id, f'{path}.adapter_id'), manifest, _target_from_proto(header, path))


def _target_from_proto(header: weights_pb2.FrameHeader, path: str) -> VersionTarget | CheckpointTarget:
    kind = header.WhichOneof('target')
    if kind == 'version':
        if header.version.version < 1:
            raise InvalidField(f'{path}.version.version', f'must be at least 1, got {header.version.version}')
        if any(entry.section == weights_pb2.STATE_SECTION_TRAINER for entry in header.manifest.tensors):
            raise InvalidField(f'{path}.manifest.tensors', 'a version holds adapter weights only')
        return VersionTarget(header.version.version, header.version.is_pinned)
    if kind == 'checkpoint':
        target = header.checkpoint
        return CheckpointTarget(
            name_from_proto(target.name, f'{path}.checkpoint.name'),
            is_overwrite_allowed=target.is_overwrite_allowed,
            step_count=not_negative(target.step_count, f'{path}.checkpoint.step_count'),
            ttl=ttl_from_proto(target.ttl, f'{path}.checkpoint.ttl') if target.HasField('ttl') else None,
            request_id=text_from_proto(target.request_id, f'{path}.checkpoint.request_id', limit=MAX_ID_LENGTH),
        )
    raise InvalidField(path, 'must say what the state becomes: version or checkpoint')


def _header_to_proto(header: Header) -> weights_pb2.FrameHeader:
    message = weights_pb2.FrameHeader(
        adapter_id=header.adapter_id,
        manifest=manifest_to_proto(header.manifest),
        encoding=weights_pb2.FRAME_ENCODING_WHOLE,
        encoded_size_bytes=header.manifest.size_bytes,
        resume_offset=header.resume_offset,
    )
    if isinstance(header.target, VersionTarget):
        message.version.version = header.target.version
        message.version.is_pinned = header.target.is_pinned
    else:
        message.checkpoint.name = header.target.name
        message.checkpoint.step_count = header.target.step_count
    return message
