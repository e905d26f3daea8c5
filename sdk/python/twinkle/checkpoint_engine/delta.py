"""Lossless deltas between two states with the same tensors: the XOR of their bytes, split into planes and compressed.

Each plane contains the bytes at one position of all elements of a block. A training step rarely changes the signs and
exponents of weights, so the planes of the upper bytes are nearly all zero. docs/weights.md describes the format.
Equal states give equal deltas with the same version of zstd, so an interrupted transfer can be resumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from twinkle.checkpoint_engine.errors import InvalidDelta
from twinkle.checkpoint_engine.manifest import DTYPE_BYTES, WeightManifest

BLOCK_BYTES = 4 << 20
"""Maximum number of bytes of a state in one block."""

_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6, write_content_size=1)
"""Level 1 with almost no search for repetitions. Repetitions in the lower planes are accidental, and encoding them
costs about 10 % of size and speed (docs/LOG.md, 2026-11-22)."""
_STORED = 0
_COMPRESSED = 1
"""First byte of a plane: `_STORED` if its content is uncompressed, `_COMPRESSED` if it is a zstd frame."""
_PLANE_HEADER_BYTES = 5
"""Size of a plane's header: one byte for the method and four for the length of the content, little-endian."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class DeltaBlock:
    """Consecutive elements of a state, all of the same size."""

    offset: int
    """Offset of the first byte in the state."""
    size_bytes: int
    item_bytes: int
    """Size of an element, which is also the number of planes."""

    @property
    def end(self) -> int:
        """Offset after the last byte in the state."""
        return self.offset + self.size_bytes


def is_delta_possible(manifest: WeightManifest, base: WeightManifest) -> bool:
    """Return whether the state of `manifest` can be encoded as a delta against the state of `base`.

    Both states must belong to the same base model and have the same tensors at the same offsets.
    """
    return manifest.base_model == base.base_model and manifest.tensors == base.tensors


def delta_blocks(manifest: WeightManifest) -> Iterator[DeltaBlock]:
    """Yield the blocks of a state in order; together they cover the state.

    Adjacent tensors with the same element size share blocks, so many small tensors cost no more than one large tensor.
    """
    begin, end, item_bytes = 0, 0, 0
    for entry in manifest.tensors:
        size = DTYPE_BYTES[entry.dtype]
        if size != item_bytes:
            yield from _cut(begin, end, item_bytes)
            begin, item_bytes = entry.offset, size
        end = entry.end
    yield from _cut(begin, end, item_bytes)


def encode_block(block: DeltaBlock, new: Buffer, base: Buffer) -> bytes:
    """Encode one block of a delta.

    Args:
        block: block to encode.
        new: bytes of the block in the state that is sent.
        base: bytes of the block in the state that the receiver has.
    """
    changed = np.bitwise_xor(np.frombuffer(new, np.uint8), np.frombuffer(base, np.uint8))
    planes = changed.reshape(-1, block.item_bytes).T
    compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    return b''.join(part for plane in planes for part in _encode_plane(compressor, np.ascontiguousarray(plane)))


def encode_delta(manifest: WeightManifest, new: Buffer, base: Buffer) -> bytes:
    """Encode a complete delta. `is_delta_possible` must be true for the two states."""
    new_view, base_view = memoryview(new), memoryview(base)
    blocks = delta_blocks(manifest)
    return b''.join(encode_block(b, new_view[b.offset : b.end], base_view[b.offset : b.end]) for b in blocks)


def apply_delta(manifest: WeightManifest, base: Buffer, delta: Buffer, target: bytearray | memoryview) -> None:
    """Apply a delta to `base` and write the new state to `target`. The caller must check the digest of the new state.

    Args:
        manifest: manifest of the new state, whose tensors have the same positions in the base.
        base: bytes of the state that the delta is relative to.
        delta: result of `encode_delta`, or the joined results of `encode_block`; untrusted.
        target: buffer of `manifest.size_bytes` bytes for the new state. Its content is undefined after an error.

    Raises:
        InvalidDelta: `delta` is not a delta between states with this manifest.
    """
    old, new = np.frombuffer(base, np.uint8), np.frombuffer(target, np.uint8)
    planes = _Planes(memoryview(delta))
    for block in delta_blocks(manifest):
        items = new[block.offset : block.end].reshape(-1, block.item_bytes)
        for plane in range(block.item_bytes):
            items[:, plane] = planes.read(len(items))
        np.bitwise_xor(items.reshape(-1), old[block.offset : block.end], out=items.reshape(-1))
    planes.finish()


class _Planes:
    """Reads consecutive planes of a delta."""

    def __init__(self, delta: memoryview) -> None:
        self._delta = delta
        self._offset = 0
        self._decompressor = zstandard.ZstdDecompressor()

    def read(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        begin = self._offset
        method, payload = self._next()
        if method == _COMPRESSED:
            payload = self._decompress(payload, size_bytes, begin=begin)
        elif method != _STORED:
            raise InvalidDelta(begin, 'has an unknown method')
        if len(payload) != size_bytes:
            raise InvalidDelta(begin, f'has {len(payload)} bytes, expected {size_bytes}')
        return np.frombuffer(payload, np.uint8)

    def finish(self) -> None:
        if self._offset != len(self._delta):
            raise InvalidDelta(self._offset, 'is followed by extra bytes')

    def _next(self) -> tuple[int, Buffer]:
        begin = self._offset + _PLANE_HEADER_BYTES
        if begin > len(self._delta):
            raise InvalidDelta(self._offset, 'is truncated')
        end = begin + int.from_bytes(self._delta[self._offset + 1 : begin], 'little')
        if end > len(self._delta):
            raise InvalidDelta(self._offset, 'is truncated')
        method = self._delta[self._offset]
        self._offset = end
        return method, self._delta[begin:end]

    def _decompress(self, payload: Buffer, size_bytes: int, *, begin: int) -> bytes:
        try:
            # zstd allocates the size in a frame's header, which is untrusted, so the size is checked first.
            if zstandard.frame_content_size(payload) != size_bytes:
                raise InvalidDelta(begin, 'has an unexpected decompressed size')
            return self._decompressor.decompress(payload, max_output_size=size_bytes)
        except zstandard.ZstdError as error:
            raise InvalidDelta(begin, 'cannot be decompressed') from error


def _cut(begin: int, end: int, item_bytes: int) -> Iterator[DeltaBlock]:
    for offset in range(begin, end, BLOCK_BYTES):
        yield DeltaBlock(offset, min(BLOCK_BYTES, end - offset), item_bytes)


def _encode_plane(compressor: zstandard.ZstdCompressor, plane: npt.NDArray[np.uint8]) -> tuple[bytes, bytes]:
    raw = plane.data
    packed = compressor.compress(raw)
    method, payload = (_COMPRESSED, packed) if len(packed) < len(raw) else (_STORED, raw.tobytes())
    return bytes([method]) + len(payload).to_bytes(_PLANE_HEADER_BYTES - 1, 'little'), payload
