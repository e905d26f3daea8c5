"""Weights in transit between services: frames, encodings, shared-memory segments, device transports, and the sender.

Modules here use neither protobuf messages nor gRPC. `twinkle_services.kit.weights.wire` converts frames to messages and
receives states.
"""

from twinkle_services.kit.weights.devices import Devices, DevicesConfig, open_devices
from twinkle_services.kit.weights.frames import (
    CheckpointTarget,
    Commit,
    DeviceTransfer,
    Encoding,
    Frame,
    Header,
    SegmentRef,
    VersionTarget,
)
from twinkle_services.kit.weights.segments import Segment, Segments, SegmentsConfig, open_segments
from twinkle_services.kit.weights.sender import Base, ReceiverOptions, Sender
from twinkle_services.kit.weights.state_bytes import BytesInMemory, StateBytes
from twinkle_services.kit.weights.transfer import FrameKind, Transfer

__all__ = [
    'Base',
    'BytesInMemory',
    'CheckpointTarget',
    'Commit',
    'DeviceTransfer',
    'Devices',
    'DevicesConfig',
    'Encoding',
    'Frame',
    'FrameKind',
    'Header',
    'ReceiverOptions',
    'Segment',
    'SegmentRef',
    'Segments',
    'SegmentsConfig',
    'Sender',
    'StateBytes',
    'Transfer',
    'VersionTarget',
    'open_devices',
    'open_segments',
]
