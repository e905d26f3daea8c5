"""Chunks back to a state, trusting none of them.

A state is given out only when every byte has come in order and the digest of them all is the
promised one. A refused chunk changes nothing: the right one may still come.
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
    """Checks the chunks of one byte sequence as they pass by, keeping none of them."""

    def __init__(self, size_bytes: int, digest: str) -> None:
        """Expect a sequence.

        Args:
            size_bytes: Bytes of the whole sequence.
            digest: blake3 of the whole sequence, hexadecimal.
        """
        self._size_bytes = size_bytes
        self._digest = digest
        self._hasher = blake3()
        self._next_offset = 0

    @property
    def next_offset(self) -> int:
        """Where the next chunk has to begin, which is how many bytes have come."""
        return self._next_offset

    def accept(self, chunk: StateChunk) -> None:
        """Check the next chunk and take it into the digest.

        Raises:
            ChunkOutOfOrder: it overlaps what came, or leaves a gap.
            ChunkOutOfRange: it reaches beyond the sequence.
            ChunkCorrupt: its bytes do not match its checksum.
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
        """Make sure that the whole sequence has come and is the promised one.

        Raises:
            StateIncomplete: bytes are missing.
            DigestMismatch: the bytes are others than promised.
        """
        if self._next_offset != self._size_bytes:
            raise StateIncomplete(self._next_offset, self._size_bytes)
        actual = self._hasher.hexdigest()
        if actual != self._digest:
            raise DigestMismatch(self._digest, actual)


class Assembler:
    """Puts one state together in memory.

    It outlives a broken stream: open the next one at `next_offset` and go on adding.
    """

    def __init__(self, manifest: WeightManifest) -> None:
        """Expect the state that `manifest` describes; its memory is used up as bytes come."""
        self._manifest = manifest
        self._verifier = ChunkVerifier(manifest.size_bytes, manifest.digest)
        self._data = bytearray(manifest.size_bytes)

    @property
    def manifest(self) -> WeightManifest:
        """The description of the state that is expected."""
        return self._manifest

    @property
    def next_offset(self) -> int:
        """Where the next chunk has to begin."""
        return self._verifier.next_offset

    def add(self, chunk: StateChunk) -> None:
        """Copy the next chunk in.

        Raises:
            ChunkOutOfOrder: it overlaps what is held, or leaves a gap.
            ChunkOutOfRange: it reaches beyond the state.
            ChunkCorrupt: its bytes do not match its checksum.
        """
        self._verifier.accept(chunk)
        self._data[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data

    def finish(self) -> PackedState:
        """Return the state, whole and verified. Its bytes alias the assembler's memory.

        Raises:
            StateIncomplete: bytes are missing.
            DigestMismatch: the bytes are others than promised.
        """
        self._verifier.finish()
        return PackedState(self._manifest, memoryview(self._data).toreadonly())
