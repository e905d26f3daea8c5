"""Conversion of frames between messages and the values of `twinkle_services.kit.weights`.

`codec` encodes and decodes chunks. This module checks the encoding of a header; the checkpoint service checks the other
fields of published headers.
"""

from collections.abc import Iterable

from twinkle.api.checkpoint.v1 import weight_stream_service_pb2 as wire
from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle.checkpoint_engine import StateChunk
from twinkle.checkpoint_engine.transport import GROUP_SIZE, MAX_PIECE_BYTES, SENDER, Rendezvous
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.fields import not_negative
from twinkle_services.kit.weights import (
    Commit,
    DeviceTransfer,
    Encoding,
    Frame,
    Header,
    ReceiverOptions,
    SegmentRef,
    VersionTarget,
)
from twinkle_services.kit.weights.wire.convert_manifest import chunk_from_proto, fill_manifest

_ENCODINGS = {
    Encoding.WHOLE: weights_pb2.FRAME_ENCODING_WHOLE,
    Encoding.DELTA: weights_pb2.FRAME_ENCODING_DELTA_XOR_ZSTD,
    Encoding.SHARED_MEMORY: weights_pb2.FRAME_ENCODING_SHARED_MEMORY,
    Encoding.DEVICE: weights_pb2.FRAME_ENCODING_DEVICE,
}
_ENCODINGS_BY_NUMBER = {number: encoding for encoding, number in _ENCODINGS.items()}
_TRANSPORTS = {
    'gloo': weights_pb2.DEVICE_TRANSPORT_GLOO,
    'nccl': weights_pb2.DEVICE_TRANSPORT_NCCL,
    'nixl': weights_pb2.DEVICE_TRANSPORT_NIXL,
    'cuda_ipc': weights_pb2.DEVICE_TRANSPORT_CUDA_IPC,
}
"""Enum numbers of the transports, by name. DeviceTransfer has a field with the name of each transport."""
_TRANSPORTS_BY_NUMBER = {number: name for name, number in _TRANSPORTS.items()}


def frame_to_subscribed(frame: Frame) -> StateChunk | wire.SubscribeResponse:
    """Return the response with a header or commit for a subscriber. A chunk is returned unchanged."""
    if isinstance(frame, StateChunk):
        return frame
    message = wire.SubscribeResponse()
    _fill(message.frame, frame)
    return message


def frame_to_fetched(frame: Frame) -> StateChunk | wire.FetchResponse:
    """Return the response with a header or commit for a fetch. A chunk is returned unchanged."""
    if isinstance(frame, StateChunk):
        return frame
    message = wire.FetchResponse()
    _fill(message.frame, frame)
    return message


def frame_to_proto(frame: Header | Commit) -> weights_pb2.WeightFrame:
    """Return the message of a header or commit."""
    message = weights_pb2.WeightFrame()
    _fill(message, frame)
    return message


def _fill(message: weights_pb2.WeightFrame, frame: Header | Commit) -> None:
    """Write a frame into an existing message, because copying a message with a manifest is expensive."""
    if isinstance(frame, Commit):
        message.commit.digest = frame.digest
        message.commit.SetInParent()
    else:
        _fill_header(message.header, frame)


def _fill_header(message: weights_pb2.FrameHeader, header: Header) -> None:
    fill_manifest(message.manifest, header.manifest)
    message.adapter_id = header.adapter_id
    message.encoding = _ENCODINGS[header.encoding]
    message.base_version = header.base_version
    message.encoded_size_bytes = header.encoded_size_bytes
    message.resume_offset = header.resume_offset
    message.encoded_digest = header.encoded_digest
    if header.segment is not None:
        message.segment.CopyFrom(segment_to_proto(header.segment))
    if header.device is not None:
        message.device.CopyFrom(device_to_proto(header.device))
    if isinstance(header.target, VersionTarget):
        message.version.version = header.target.version
        message.version.is_pinned = header.target.is_pinned
        if header.target.publish_time is not None:
            message.version.publish_time.FromDatetime(header.target.publish_time)
    else:
        message.checkpoint.name = header.target.name
        message.checkpoint.step_count = header.target.step_count


def frame_of(
    message: StateChunk | wire.PublishRequest | wire.SubscribeResponse | wire.FetchResponse,
) -> StateChunk | weights_pb2.FrameHeader | Commit:
    """Return the frame of a message; a header is returned without conversion.

    Raises:
        InvalidField: The message has no frame.
    """
    if isinstance(message, StateChunk):
        return message
    kind = message.frame.WhichOneof('frame')
    if kind == 'header':
        return message.frame.header
    if kind == 'chunk':
        return chunk_from_proto(message.frame.chunk)
    if kind == 'commit':
        return Commit(message.frame.commit.digest)
    raise InvalidField('frame', 'must have a header, a chunk or a commit')


def segment_to_proto(segment: SegmentRef) -> weights_pb2.SharedSegment:
    """Return the message of a segment reference."""
    return weights_pb2.SharedSegment(host_id=segment.host_id, name=segment.name, size_bytes=segment.size_bytes)


def segment_from_proto(message: weights_pb2.SharedSegment) -> SegmentRef:
    """Return the unchecked segment reference of a message; opening the segment checks it."""
    return SegmentRef(message.host_id, message.name, message.size_bytes)


def device_to_proto(transfer: DeviceTransfer) -> weights_pb2.DeviceTransfer:
    """Return the message of a transfer over a device transport."""
    message = weights_pb2.DeviceTransfer(piece_bytes=transfer.piece_bytes)
    body = getattr(message, transfer.transport)
    body.rendezvous.address = transfer.rendezvous.address
    body.rendezvous.secret = transfer.rendezvous.secret
    if isinstance(body, weights_pb2.DeviceGroup):
        body.root_rank, body.group_size = SENDER, GROUP_SIZE
    return message


def device_from_proto(message: weights_pb2.DeviceTransfer, field: str) -> DeviceTransfer:
    """Return a transfer over a device transport.

    Raises:
        InvalidField: The transport is unset or unknown, or its group or the size of pieces is unsupported.
    """
    name = message.WhichOneof('transport')
    if name is None:
        raise InvalidField(field, 'must have a transport that the receiver offered')
    body = getattr(message, name)
    if isinstance(body, weights_pb2.DeviceGroup) and (body.root_rank, body.group_size) != (SENDER, GROUP_SIZE):
        raise InvalidField(f'{field}.{name}', f'must have root_rank {SENDER} and group_size {GROUP_SIZE}')
    if not 0 < message.piece_bytes <= MAX_PIECE_BYTES:
        raise InvalidField(f'{field}.piece_bytes', f'must be from 1 to {MAX_PIECE_BYTES}, got {message.piece_bytes}')
    return DeviceTransfer(name, Rendezvous(body.rendezvous.address, body.rendezvous.secret), message.piece_bytes)


def transports_to_proto(names: Iterable[str]) -> list[weights_pb2.DeviceTransport.ValueType]:
    """Return the contract's enum numbers of these transports, sorted."""
    return sorted(_TRANSPORTS[name] for name in names)


def encoding_from_proto(encoding: weights_pb2.FrameEncoding.ValueType, field: str) -> Encoding:
    """Return an encoding.

    Raises:
        InvalidField: The encoding is unset or unknown.
    """
    found = _ENCODINGS_BY_NUMBER.get(encoding)
    if found is None:
        raise InvalidField(
            field,
            'must be FRAME_ENCODING_WHOLE, FRAME_ENCODING_DELTA_XOR_ZSTD, FRAME_ENCODING_SHARED_MEMORY or '
            'FRAME_ENCODING_DEVICE',
        )
    return found


def encodings_to_proto(encodings: frozenset[Encoding]) -> list[weights_pb2.FrameEncoding.ValueType]:
    """Return the contract's enum numbers of these encodings, sorted."""
    return sorted(_ENCODINGS[encoding] for encoding in encodings)


def receiver_options_from_proto(request: wire.SubscribeRequest) -> ReceiverOptions:
    """Return the encodings that a subscriber accepts, and the position at which it resumes.

    Unknown encodings and transports are ignored.

    Raises:
        InvalidField: The offset is negative.
    """
    offered = (_ENCODINGS_BY_NUMBER.get(number) for number in request.accepted_encodings)
    return ReceiverOptions(
        frozenset(encoding for encoding in offered if encoding is not None),
        request.host_id,
        _transports_from_proto(request.accepted_transports),
        resume_offset=not_negative(request.resume_offset, 'resume_offset'),
        resume_digest=request.resume_digest,
    )


def fetch_options_from_proto(request: wire.FetchRequest) -> ReceiverOptions:
    """Return the encodings that the caller of a fetch accepts, and the byte to start from.

    Raises:
        InvalidField: The offset is negative.
    """
    transports = _transports_from_proto(request.accepted_transports)
    shared = {Encoding.SHARED_MEMORY} if request.host_id else set[Encoding]()
    device = {Encoding.DEVICE} if transports else set[Encoding]()
    offset = not_negative(request.offset, 'offset')
    return ReceiverOptions(frozenset(shared | device), request.host_id, transports, resume_offset=offset)


def _transports_from_proto(numbers: Iterable[weights_pb2.DeviceTransport.ValueType]) -> frozenset[str]:
    return frozenset(_TRANSPORTS_BY_NUMBER[number] for number in numbers if number in _TRANSPORTS_BY_NUMBER)
