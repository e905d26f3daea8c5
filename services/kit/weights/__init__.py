"""States on their way between processes: frames, encodings, segments of shared memory, and sending.

Pure: neither messages nor sockets are known here. How frames become bytes on a connection, and how
states are received, is `services.kit.weights.wire`.
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
from services.kit.weights.sender import Base, Sender, Wanted
from services.kit.weights.state_bytes import HeldBytes, StateBytes
from services.kit.weights.transfer import FrameKind, Transfer

__all__ = [
    'Base',
    'CheckpointTarget',
    'Commit',
    'Encoding',
    'Frame',
    'FrameKind',
    'Header',
    'HeldBytes',
    'Segment',
    'SegmentRef',
    'Segments',
    'SegmentsConfig',
    'Sender',
    'StateBytes',
    'Transfer',
    'VersionTarget',
    'Wanted',
    'open_segments',
]
