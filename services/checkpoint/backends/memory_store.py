"""A store in memory: the reference for tests of the other stores."""

from dataclasses import dataclass, replace

from twinkle.checkpoint_engine import (
    Assembler,
    PackedState,
    StateChunk,
    WeightManifest,
    state_digest,
    weights_file,
    weights_header,
)
from twinkle_services.checkpoint.backends.errors import domain_errors, not_found
from twinkle_services.checkpoint.backends.pieces import (
    Piece,
    PieceSource,
    StatePieceSource,
    archive_files,
    given_piece,
    tar_pieces,
)
from twinkle_services.checkpoint.backends.record_json import adapter_part
from twinkle_services.checkpoint.domain import (
    AdapterKey,
    Checkpoint,
    CheckpointKey,
    DamagedState,
    NewestMark,
    Record,
    VersionKey,
)
from twinkle_services.kit.errors import MemoryNotShared
from twinkle_services.kit.weights import SegmentRef
from twinkle_services.kit.worker import Threads

_Key = VersionKey | CheckpointKey


@dataclass(frozen=True)
class _StoredState:
    record: Record
    state: PackedState


class MemoryStore:
    """Implements `StateStore` in memory; states are lost when the process exits."""

    def __init__(self, threads: Threads) -> None:
        """Create an empty store. Its sources read in `threads`, as the sources of `FolderStore` do."""
        self._threads = threads
        self._states: dict[_Key, _StoredState] = {}
        self._marks: dict[AdapterKey, NewestMark] = {}

    async def load(self) -> list[Record | NewestMark | DamagedState]:
        return [*(stored.record for stored in self._states.values()), *self._marks.values()]

    def begin(self, key: _Key, manifest: WeightManifest) -> 'MemoryWriter':
        return MemoryWriter(self._states, key, manifest)

    async def open_state(self, key: _Key, *, is_adapter_only: bool) -> StatePieceSource:
        state = self._get(key).state
        manifest, data = state.manifest, bytes(state.data)
        if is_adapter_only:
            data = data[: manifest.weights_size_bytes]
            manifest = adapter_part(manifest, state_digest(data))
        return StatePieceSource(manifest, [Piece(len(data), content=data)], self._threads)

    async def open_archive(self, checkpoint: Checkpoint) -> PieceSource:
        state = self._get(checkpoint.key).state
        manifest = state.manifest
        weights = weights_header(manifest) + bytes(state.data[: manifest.weights_size_bytes])
        files = [*archive_files(manifest, checkpoint).items(), (weights_file(manifest), weights)]
        return PieceSource(tar_pieces([(name, *given_piece(data)) for name, data in files]), self._threads)

    async def update(self, record: Record) -> None:
        self._states[record.key] = replace(self._get(record.key), record=record)

    async def mark_newest(self, mark: NewestMark) -> None:
        self._marks[mark.adapter] = mark

    async def delete(self, key: _Key) -> None:
        self._states.pop(key, None)

    def _get(self, key: _Key) -> _StoredState:
        stored = self._states.get(key)
        if stored is None:
            raise not_found(key)
        return stored


class MemoryWriter:
    """Implements `StateWriter` in memory."""

    def __init__(self, states: dict[_Key, _StoredState], key: _Key, manifest: WeightManifest) -> None:
        self._states = states
        self._key = key
        self._assembler = Assembler(manifest)

    @property
    def folder(self) -> str:
        """Always empty, since the state has no folder."""
        return ''

    async def add(self, chunk: StateChunk) -> None:
        with domain_errors():
            self._assembler.add(chunk)

    async def adopt(self, segment: SegmentRef) -> None:
        """Raise `MemoryNotShared`: this store does not accept segments of shared memory."""
        raise MemoryNotShared()

    async def commit(self, record: Record) -> None:
        with domain_errors():
            self._states[self._key] = _StoredState(record, self._assembler.finish())

    async def discard(self) -> None:
        """Do nothing: the buffer is freed with the writer."""
