"""What the application needs of the world: a store of states, sources of bytes, and uploads.

Every implementation passes the same suite, tests/contract/checkpoint; the store in memory is the
oracle for the one on disk.
"""

from datetime import datetime
from typing import Protocol

from services.checkpoint.domain import CheckpointKey, Record, VersionKey
from twinkle.checkpoint_engine import StateChunk, WeightManifest


class ByteSource(Protocol):
    """Bytes that can be read from any place.

    What was opened stays readable until it is closed, even when it is deleted meanwhile.
    Concurrency: one `read` at a time.
    """

    @property
    def size_bytes(self) -> int:
        """How many there are."""
        ...

    async def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, fewer only at the end."""
        ...

    async def close(self) -> None:
        """Let go of what was opened."""
        ...


class StateSource(ByteSource, Protocol):
    """The bytes of a state, as its manifest lays them out."""

    @property
    def manifest(self) -> WeightManifest:
        """Describes the bytes."""
        ...


class StateWriter(Protocol):
    """Takes the chunks of one state. Nothing of it can be seen before `commit` has returned.

    Concurrency: one call at a time; `discard` may come after a cancelled call.
    """

    @property
    def folder(self) -> str:
        """The peft folder it becomes, where the store is a local disk; else empty."""
        ...

    async def add(self, chunk: StateChunk) -> None:
        """Take the next chunk. One that is refused changes nothing.

        Raises:
            ChunkCorrupt: its bytes do not match its checksum.
            StreamOutOfOrder: it overlaps what came or leaves a gap.
            InvalidField: it reaches beyond the state.
        """
        ...

    async def commit(self, record: Record) -> None:
        """Make the state durable and visible under the record's key, replacing what was there.

        Raises:
            StreamOutOfOrder: bytes are missing.
            DigestMismatch: the bytes are others than the manifest promised.
        """
        ...

    async def discard(self) -> None:
        """Remove what was written, unless it was committed."""
        ...


class StateStore(Protocol):
    """Keeps states with their records."""

    async def load(self) -> list[Record]:
        """Remove what was never committed, and return the records of all that was. Call once, first."""
        ...

    def begin(self, key: VersionKey | CheckpointKey, manifest: WeightManifest) -> StateWriter:
        """Return a writer for a state; nothing happens before its first call."""
        ...

    async def open_state(self, key: VersionKey | CheckpointKey, *, is_adapter_only: bool) -> StateSource:
        """Open a state.

        Args:
            key: Which.
            is_adapter_only: Leave out the trainer's section; the manifest describes what is left.

        Raises:
            VersionNotFound, CheckpointNotFound: it is not here, or no longer.
        """
        ...

    async def open_archive(self, key: CheckpointKey) -> ByteSource:
        """Open a checkpoint as a tar archive of its peft folder; always the same bytes.

        Raises:
            CheckpointNotFound: it is not here, or no longer.
        """
        ...

    async def update(self, record: Record) -> None:
        """Replace the record of a committed state."""
        ...

    async def delete(self, key: VersionKey | CheckpointKey) -> None:
        """Remove a state and its record; nothing happens where there is none."""
        ...


class Upload(Protocol):
    """An archive on its way in; what came survives a broken stream and a restart."""

    @property
    def held_bytes(self) -> int:
        """How many bytes have come."""
        ...

    async def add(self, chunk: StateChunk) -> None:
        """Take a chunk. Bytes that are held already are passed over.

        Raises:
            ChunkCorrupt: its bytes do not match its checksum.
            StreamOutOfOrder: it leaves a gap.
            InvalidField: it reaches beyond the announced size.
        """
        ...

    async def open_adapter(self, base_model: str) -> StateSource:
        """Open the adapter inside the archive.

        Args:
            base_model: The base model it belongs to.

        Raises:
            InvalidField: the archive holds no peft folder of safetensors.
        """
        ...

    async def discard(self) -> None:
        """Forget the upload and its bytes."""
        ...

    async def close(self) -> None:
        """Let go of the upload; another stream may go on with it."""
        ...


class UploadStore(Protocol):
    """Keeps uploads until they are whole."""

    async def open(self, tenant_id: str, upload_id: str, *, size_bytes: int) -> Upload:
        """Open an upload, new or begun.

        Raises:
            InUse: another stream has it open.
            InvalidField: more bytes than this came before.
        """
        ...

    async def discard_older(self, moment: datetime) -> None:
        """Forget the uploads that nothing was added to since `moment`."""
        ...
