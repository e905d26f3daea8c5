"""A state on its way out: in a segment of shared memory where there is one, else in this process's own memory."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from services.kit.weights import Segment, Segments
from twinkle.checkpoint_engine import PackedState
from twinkle.checkpoint_engine.packing import StatePlan

_log = structlog.get_logger('weights')


@dataclass(frozen=True)
class Outgoing:
    """A state and the segment that holds it, if one does."""

    state: PackedState
    segment: Segment | None = None

    def close(self) -> None:
        """Remove the segment's name; who has linked it keeps it."""
        if self.segment is not None:
            self.segment.remove()


def place(state: PackedState | StatePlan, segments: Segments | None) -> Outgoing:
    """Put a state where it is sent from: one copy of its tensors.

    A state that lies in this process already is copied into a segment, too: that costs less than sending it.
    """
    size_bytes = state.manifest.size_bytes if isinstance(state, PackedState) else state.size_bytes
    if segments is not None and size_bytes:
        try:
            return _placed(state, segments)
        except OSError as error:
            _log.warning('no_shared_memory', size_bytes=size_bytes, problem=error.strerror)
    return Outgoing(state if isinstance(state, PackedState) else state.pack())


def _placed(state: PackedState | StatePlan, segments: Segments) -> Outgoing:
    """Return a state in a segment.

    Raises:
        OSError: there is not so much memory.
    """
    if isinstance(state, PackedState):
        segment = segments.write([state.data])
        return Outgoing(PackedState(state.manifest, segment.data), segment)
    # What one thread writes the other one hashes, and finds it in the processor's cache.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix='digest') as beside:
        digest = beside.submit(state.digest)
        segment = segments.write(state.parts)
        manifest = state.describe(digest.result())
    return Outgoing(PackedState(manifest, segment.data), segment)
