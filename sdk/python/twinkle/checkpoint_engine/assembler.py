"""Assembles and verifies a state from untrusted chunks.

A state is returned only after all bytes have arrived in order and their digest matches the manifest. A refused chunk
changes nothing, so the correct chunk can be sent afterwards.
"""

from blake3 import blake3

from twinkle.checkpoint_engine.chunks import StateChunk, chunk_checksum
from twinkle.checkpoint_engine.errors import (
    ChunkCorrupt,
    ChunkOutOfOrder,
    ChunkOutOfRange,
    DigestMismatch,
    StateIncomplete,
)
from twinkle.checkpoint_engine.manifest import WeightManifest
from twinkle.checkpoint_engine.packing import PackedState


class ChunkVerifier:
    """Verifies the chunks of one byte sequence without storing them.

    Args:
        size_bytes: size of the complete sequence.
        digest: blake3 of the complete sequence, hexadecimal.
    """

    def __init__(self, size_bytes: int, digest: str) -> None:
        self._size_bytes = size_bytes
        self._digest = digest
        self._hasher = blake3()
        self._next_offset = 0

    @property
    def next_offset(self) -> int:
        """Offset of the next chunk, which equals the number of accepted bytes."""
        return self._next_offset

    def accept(self, chunk: StateChunk) -> None:
        """Check the next chunk and add it to the digest.

        Raises:
            ChunkOutOfOrder: the chunk does not start at `next_offset`.
            ChunkOutOfRange: the chunk extends beyond the end of the sequence.
            ChunkCorrupt: the chunk's bytes do not match its checksum.
        """
        if chunk.offset != self._next_offset:
            raise ChunkOutOfOrder(chunk.offset, self._next_offset)
        end = chunk.offset + len(chunk.data)
        if end > self._size_bytes:
            raise ChunkOutOfRange(chunk.offset, end, self._size_bytes)
        if chunk_checksum(chunk.data) != chunk.checksum:
            raise ChunkCorrupt(chunk.offset)
        self._hasher.update(chunk.data)
        self._next_offset = end

    def finish(self) -> None:
        """Check that the sequence is complete and matches the digest.

        Raises:
            StateIncomplete: bytes are missing.
            DigestMismatch: the digest of the bytes differs from the expected digest.
        """
        if self._next_offset != self._size_bytes:
            raise StateIncomplete(self._next_offset, self._size_bytes)
        actual = self._hasher.hexdigest()
        if actual != self._digest:
            raise DigestMismatch(self._digest, actual)


class Assembler:
    """Assembles one state in memory.

    After an interrupted stream, open another stream at `next_offset` and continue to add chunks.

    Args:
        manifest: description of the expected state.
    """

    def __init__(self, manifest: WeightManifest) -> None:
        self._manifest = manifest
        self._verifier = ChunkVerifier(manifest.size_bytes, manifest.digest)
        self._data = bytearray(manifest.size_bytes)

    @property
    def manifest(self) -> WeightManifest:
        """Description of the expected state."""
        return self._manifest

    @property
    def next_offset(self) -> int:
        """Offset of the next chunk."""
        return self._verifier.next_offset

    def add(self, chunk: StateChunk) -> None:
        """Check the next chunk and copy it into the state.

        Raises:
            ChunkOutOfOrder: the chunk does not start at `next_offset`.
            ChunkOutOfRange: the chunk extends beyond the end of the state.
            ChunkCorrupt: the chunk's bytes do not match its checksum.
        """
        self._verifier.accept(chunk)
        self._data[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data

    def finish(self) -> PackedState:
        """Return the complete, verified state. Its bytes alias the assembler's memory.

        Raises:
            StateIncomplete: bytes are missing.
            DigestMismatch: the digest of the bytes differs from the expected digest.
        """
        self._verifier.finish()
        return PackedState(self._manifest, memoryview(self._data).toreadonly())
