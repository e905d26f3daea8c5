"""States to be sent, placed in shared memory if possible."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from twinkle.checkpoint_engine import PackedState
from twinkle.checkpoint_engine.packing import StatePlan
from twinkle_services.kit.weights import Segment, Segments

_log = structlog.get_logger('weights')


@dataclass(frozen=True)
class Outgoing:
    """A state to be sent, and the segment that contains it, if any."""

    state: PackedState
    segment: Segment | None = None

    def close(self) -> None:
        """Remove the segment's name; processes that linked the segment can still read it."""
        if self.segment is not None:
            self.segment.remove()


def place(state: PackedState | StatePlan, segments: Segments | None) -> Outgoing:
    """Place a state in shared memory, or else in the memory of this process, with at most one copy of its tensors.

    A packed state is copied into a segment as well, because that costs less than sending it.
    """
    size_bytes = state.manifest.size_bytes if isinstance(state, PackedState) else state.size_bytes
    if segments is not None and size_bytes:
        try:
            return _placed(state, segments)
        except OSError as error:
            _log.warning('shared memory not usable; sending bytes', size_bytes=size_bytes, problem=error.strerror)
    return Outgoing(state if isinstance(state, PackedState) else state.pack())


def _placed(state: PackedState | StatePlan, segments: Segments) -> Outgoing:
    """Return a state in a segment.

    Raises:
        OSError: There is not enough memory.
    """
    if isinstance(state, PackedState):
        segment = segments.write([state.data])
        return Outgoing(PackedState(state.manifest, segment.data), segment)
    # One thread writes while the other one hashes the same parts, which are then in the processor's cache.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix='digest') as executor:
        digest = executor.submit(state.digest)
        segment = segments.write(state.parts)
        manifest = state.describe(digest.result())
    return Outgoing(PackedState(manifest, segment.data), segment)
