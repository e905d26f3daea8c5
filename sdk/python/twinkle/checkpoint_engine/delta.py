"""A state as the difference to another one of the same tensors: byte planes of an XOR, compressed. Lossless.

Weights change little in a training step: signs and exponents stay, so the planes of the upper bytes
are nearly all zero and the lower ones are short numbers. The layout stands in docs/weights.md. Equal
states give equal bytes with the same version of zstd, so a cut transfer can go on.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from twinkle.checkpoint_engine.errors import InvalidDelta
from twinkle.checkpoint_engine.manifest import DTYPE_BYTES, WeightManifest

BLOCK_BYTES = 4 << 20
"""Most bytes of a state that are encoded as one."""

_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6, write_content_size=1)
"""Level 1 that hardly looks for repetitions: the lower planes have none, and those found by chance cost a tenth of
the size and of the speed (docs/LOG.md, 2026-11-22)."""
_STORED = 0
_COMPRESSED = 1
_PLANE_HEADER_BYTES = 5

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class DeltaBlock:
    """Consecutive bytes of a state whose elements have one size."""

    offset: int
    """Where they begin in the state."""
    size_bytes: int
    item_bytes: int
    """Bytes of an element, and so the number of planes."""

    @property
    def end(self) -> int:
        """Where they end in the state."""
        return self.offset + self.size_bytes


def is_delta_possible(manifest: WeightManifest, base: WeightManifest) -> bool:
    """Say whether a state can be written as a delta to another: the same tensors lie at the same places."""
    return manifest.base_model == base.base_model and manifest.tensors == base.tensors


def delta_blocks(manifest: WeightManifest) -> Iterator[DeltaBlock]:
    """Yield the blocks of a state in order; together they are all of it.

    Neighbouring tensors of the same element size share blocks, so many small ones cost no more than a large one.
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
    """Return one block of a delta.

    Args:
        block: Which.
        new: Its bytes in the state that is encoded.
        base: Its bytes in the state that the receiver holds.
    """
    changed = np.bitwise_xor(np.frombuffer(new, np.uint8), np.frombuffer(base, np.uint8))
    planes = changed.reshape(-1, block.item_bytes).T
    compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    return b''.join(part for plane in planes for part in _encode_plane(compressor, np.ascontiguousarray(plane)))


def encode_delta(manifest: WeightManifest, new: Buffer, base: Buffer) -> bytes:
    """Return a whole delta at once; `is_delta_possible` has to hold of the two states."""
    new_view, base_view = memoryview(new), memoryview(base)
    blocks = delta_blocks(manifest)
    return b''.join(encode_block(b, new_view[b.offset : b.end], base_view[b.offset : b.end]) for b in blocks)


def apply_delta(manifest: WeightManifest, base: Buffer, delta: Buffer, target: bytearray | memoryview) -> None:
    """Write the state that a delta leads to. The caller checks its digest.

    Args:
        manifest: Describes both the base and the state that is made.
        base: The state that the delta starts from.
        delta: What `encode_delta` or the blocks of `encode_block` made; trusted in nothing.
        target: Takes `manifest.size_bytes` bytes. Of no meaning after an error.

    Raises:
        InvalidDelta: these are no bytes of a delta between such states.
    """
    old, new = np.frombuffer(base, np.uint8), np.frombuffer(target, np.uint8)
    planes = _Planes(memoryview(delta))
    for block in delta_blocks(manifest):
        items = new[block.offset : block.end].reshape(-1, block.item_bytes)
        for plane in range(block.item_bytes):
            items[:, plane] = planes.take(len(items))
        np.bitwise_xor(items.reshape(-1), old[block.offset : block.end], out=items.reshape(-1))
    planes.finish()


class _Planes:
    """Reads planes one after the other."""

    def __init__(self, delta: memoryview) -> None:
        self._delta = delta
        self._offset = 0
        self._decompressor = zstandard.ZstdDecompressor()

    def take(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        method, payload = self._next()
        if method == _COMPRESSED:
            payload = self._decompress(payload, size_bytes)
        elif method != _STORED:
            raise InvalidDelta(self._offset, 'begins with no method that is known')
        if len(payload) != size_bytes:
            raise InvalidDelta(self._offset, f'has {len(payload)} bytes where {size_bytes} are needed')
        return np.frombuffer(payload, np.uint8)

    def finish(self) -> None:
        if self._offset != len(self._delta):
            raise InvalidDelta(self._offset, 'is more than the state has place for')

    def _next(self) -> tuple[int, Buffer]:
        begin = self._offset + _PLANE_HEADER_BYTES
        if begin > len(self._delta):
            raise InvalidDelta(self._offset, 'ends in the middle of a plane')
        end = begin + int.from_bytes(self._delta[self._offset + 1 : begin], 'little')
        if end > len(self._delta):
            raise InvalidDelta(self._offset, 'ends in the middle of a plane')
        method = self._delta[self._offset]
        self._offset = end
        return method, self._delta[begin:end]

    def _decompress(self, payload: Buffer, size_bytes: int) -> bytes:
        try:
            # zstd believes the size that a frame claims: it is checked before memory is taken for it.
            if zstandard.frame_content_size(payload) != size_bytes:
                raise InvalidDelta(self._offset, 'unpacks to another size than is needed')
            return self._decompressor.decompress(payload, max_output_size=size_bytes)
        except zstandard.ZstdError as error:
            raise InvalidDelta(self._offset, 'cannot be unpacked') from error


def _cut(begin: int, end: int, item_bytes: int) -> Iterator[DeltaBlock]:
    for offset in range(begin, end, BLOCK_BYTES):
        yield DeltaBlock(offset, min(BLOCK_BYTES, end - offset), item_bytes)


def _encode_plane(compressor: zstandard.ZstdCompressor, plane: npt.NDArray[np.uint8]) -> tuple[bytes, bytes]:
    raw = plane.data
    packed = compressor.compress(raw)
    method, payload = (_COMPRESSED, packed) if len(packed) < len(raw) else (_STORED, raw.tobytes())
    return bytes([method]) + len(payload).to_bytes(_PLANE_HEADER_BYTES - 1, 'little'), payload
