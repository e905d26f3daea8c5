"""Weights in transit between services: frames, encodings, shared-memory segments, and the sender.

Modules here depend on neither messages nor connections. `services.kit.weights.wire` converts frames to messages and
receives states.
"""

from services.kit.weights.frames import (
    CheckpointTarget,
    Commit,
    Encoding,
    Frame,
    Header,
    SegmentRef,
    VersionTarget,
)
from services.kit.weights.segments import Segment, Segments, SegmentsConfig, open_segments
from services.kit.weights.sender import Base, ReceiverOptions, Sender
from services.kit.weights.state_bytes import BytesInMemory, StateBytes
from services.kit.weights.transfer import FrameKind, Transfer

__all__ = [
    'Base',
    'BytesInMemory',
    'CheckpointTarget',
    'Commit',
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
    'open_segments',
]
