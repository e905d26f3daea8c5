"""The store in memory: the oracle for the one on disk, and enough where nothing has to last."""

from dataclasses import dataclass, replace
from functools import partial

from services.checkpoint.backends.checked_chunks import domain_errors
from services.checkpoint.backends.pieces import Piece, PieceSource, StatePieceSource, tar_pieces
from services.checkpoint.backends.record_json import adapter_part
from services.checkpoint.domain import AdapterKey, CheckpointKey, NewestMark, Record, VersionKey
from services.kit.errors import CheckpointNotFound, MemoryNotShared, NotFound, VersionNotFound
from services.kit.weights import SegmentRef
from services.kit.worker import Threads
from twinkle.checkpoint_engine import (
    Assembler,
    PackedState,
    StateChunk,
    WeightManifest,
    description_files,
    state_digest,
    weights_file,
    weights_header,
)

_Key = VersionKey | CheckpointKey


@dataclass(frozen=True)
class _Held:
    record: Record
    state: PackedState


class MemoryStore:
    """Keeps states until the process ends."""

    def __init__(self, threads: Threads) -> None:
        """Begin empty; sources read in `threads`, as those of a disk do."""
        self._threads = threads
        self._held: dict[_Key, _Held] = {}
        self._marks: dict[AdapterKey, NewestMark] = {}

    async def load(self) -> list[Record | NewestMark]:
        """Return the records of all that was committed, and the marks."""
        return [*(held.record for held in self._held.values()), *self._marks.values()]

    def begin(self, key: _Key, manifest: WeightManifest) -> 'MemoryWriter':
        """Return a writer for a state."""
        return MemoryWriter(self._held, key, manifest)

    async def open_state(self, key: _Key, *, is_adapter_only: bool) -> StatePieceSource:
        """Open a state; see the port."""
        state = self._get(key).state
        manifest, data = state.manifest, bytes(state.data)
        if is_adapter_only:
            data = data[: manifest.weights_size_bytes]
            manifest = adapter_part(manifest, state_digest(data))
        return StatePieceSource(manifest, [Piece(len(data), content=data)], self._threads)

    async def open_archive(self, key: CheckpointKey) -> PieceSource:
        """Open a checkpoint as a tar archive; see the port."""
        state = self._get(key).state
        manifest = state.manifest
        weights = weights_header(manifest) + bytes(state.data[: manifest.weights_size_bytes])
        files = [*description_files(manifest).items(), (weights_file(manifest), weights)]
        return PieceSource(
            tar_pieces([(name, len(data), partial(_piece, data)) for name, data in files]), self._threads
        )

    async def update(self, record: Record) -> None:
        """Replace the record of a committed state."""
        self._held[record.key] = replace(self._get(record.key), record=record)

    async def mark_newest(self, mark: NewestMark) -> None:
        """Remember a number in place of the adapter's mark before it."""
        self._marks[mark.adapter] = mark

    async def delete(self, key: _Key) -> None:
        """Remove a state and its record; nothing happens where there is none."""
        self._held.pop(key, None)

    def _get(self, key: _Key) -> _Held:
        held = self._held.get(key)
        if held is None:
            raise _not_found(key)
        return held


class MemoryWriter:
    """One state on its way into memory."""

    def __init__(self, held: dict[_Key, _Held], key: _Key, manifest: WeightManifest) -> None:
        """Put the state into `held` when it is committed."""
        self._held = held
        self._key = key
        self._assembler = Assembler(manifest)

    @property
    def folder(self) -> str:
        """There is none."""
        return ''

    async def add(self, chunk: StateChunk) -> None:
        """Take the next chunk; see the port."""
        with domain_errors():
            self._assembler.add(chunk)

    async def adopt(self, segment: SegmentRef) -> None:
        """Refuse: this memory is nobody else's."""
        raise MemoryNotShared()

    async def commit(self, record: Record) -> None:
        """Make the state visible; see the port."""
        with domain_errors():
            self._held[self._key] = _Held(record, self._assembler.finish())

    async def discard(self) -> None:
        """Nothing was made."""


def _piece(data: bytes, size_bytes: int) -> Piece:
    return Piece(size_bytes, content=data)


def _not_found(key: _Key) -> NotFound:
    if isinstance(key, VersionKey):
        return VersionNotFound(key.adapter.adapter_id, key.version)
    return CheckpointNotFound(key.checkpoint_id)
