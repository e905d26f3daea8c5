"""Byte sources composed of pieces of files, such as a state or a tar archive.

A state consists of the tensor bytes of one or two safetensors files. An archive consists of tar headers, files and
padding. Both can be read from any offset without creating them on disk.
"""

import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC
from threading import Lock
from typing import IO

from twinkle.checkpoint_engine import WeightManifest, shared_files
from twinkle_services.checkpoint.domain import Checkpoint
from twinkle_services.kit.weights import SegmentRef
from twinkle_services.kit.worker import Threads


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes, either of a file or given directly."""

    size_bytes: int
    file: IO[bytes] | None = None
    """Source of the bytes; None if `content` contains the bytes."""
    file_offset: int = 0
    """Offset of the first byte in the file."""
    content: bytes = b''


class PieceSource:
    """Reads a sequence of pieces as one byte source."""

    def __init__(self, pieces: Sequence[Piece], threads: Threads) -> None:
        """Create a source that reads `pieces` in `threads`; closing it closes their files."""
        self._pieces = tuple(pieces)
        self._threads = threads
        # The thread of a cancelled read may still be running when the source is closed.
        self._lock = Lock()
        self._on_close: Callable[[], None] | None = None

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` in a worker thread once the files are closed."""
        self._on_close = callback

    @property
    def size_bytes(self) -> int:
        """Total size of the pieces."""
        return sum(piece.size_bytes for piece in self._pieces)

    async def read(self, offset: int, length: int) -> bytes:
        return await self._threads.run(self._read, offset, length)

    async def close(self) -> None:
        await self._threads.run(self._close)

    def _read(self, offset: int, length: int) -> bytes:
        parts: list[bytes] = []
        begin = 0
        with self._lock:
            for piece in self._pieces:
                first = max(offset - begin, 0)
                last = min(offset + length - begin, piece.size_bytes)
                if first < last:
                    parts.append(_read_piece(piece, first, last))
                begin += piece.size_bytes
        return parts[0] if len(parts) == 1 else b''.join(parts)

    def _close(self) -> None:
        with self._lock:
            for piece in self._pieces:
                if piece.file is not None:
                    piece.file.close()
            callback, self._on_close = self._on_close, None
        if callback is not None:
            callback()


class StatePieceSource(PieceSource):
    """Implements `StateSource` over the pieces of a state."""

    def __init__(self, manifest: WeightManifest, pieces: Sequence[Piece], threads: Threads) -> None:
        super().__init__(pieces, threads)
        self._manifest = manifest

    @property
    def manifest(self) -> WeightManifest:
        return self._manifest

    @property
    def segment(self) -> SegmentRef | None:
        """Always None, since the bytes are not in shared memory."""
        return None


def tar_pieces(files: Sequence[tuple[str, int, Callable[[int], Piece]]]) -> list[Piece]:
    """Return the pieces of a tar archive. The same files always yield the same bytes.

    Args:
        files: Name and size in bytes of each file, and a function that returns the file's piece for its size.
    """
    pieces: list[Piece] = []
    for name, size_bytes, piece_of in files:
        info = tarfile.TarInfo(name)
        info.size = size_bytes
        header = info.tobuf(tarfile.GNU_FORMAT)
        padding = bytes(-size_bytes % tarfile.BLOCKSIZE)
        pieces += [Piece(len(header), content=header), piece_of(size_bytes), Piece(len(padding), content=padding)]
    end = bytes(2 * tarfile.BLOCKSIZE)
    return [*pieces, Piece(len(end), content=end)]


def given_piece(data: bytes) -> tuple[int, Callable[[int], Piece]]:
    """Return the size of a file with the given content, and the function that returns its piece, for `tar_pieces`."""
    return len(data), lambda size_bytes: Piece(size_bytes, content=data)


def archive_files(manifest: WeightManifest, checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the files in a checkpoint's archive other than the weights file, by name.

    The card contains nothing that only the tenant may see, because archives of public checkpoints are readable by all.
    """
    facts = {'run': checkpoint.key.adapter.adapter_id, 'checkpoint': checkpoint.key.name}
    if checkpoint.step_count:
        facts['optimizer steps'] = str(checkpoint.step_count)
    facts['saved'] = checkpoint.create_time.astimezone(UTC).date().isoformat()
    return shared_files(manifest, title=checkpoint.key.name, facts=facts)


def _read_piece(piece: Piece, first: int, last: int) -> bytes:
    if piece.file is None:
        return piece.content[first:last]
    piece.file.seek(piece.file_offset + first)
    data = piece.file.read(last - first)
    if len(data) != last - first:
        raise OSError('a stored file is shorter than when it was committed')
    return data
