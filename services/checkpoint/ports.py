"""What the application needs of the world: a store of states, sources of bytes, and uploads.

Every implementation passes the same suite, tests/contract/checkpoint; the store in memory is the
oracle for the one on disk.
"""

from datetime import datetime
from typing import Protocol

from services.checkpoint.domain import CheckpointKey, NewestMark, Record, VersionKey
from services.kit.weights import SegmentRef, StateBytes
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

    async def read(self, offset: int, length: int) -> bytes | memoryview:
        """Return `length` bytes from `offset` on, fewer only at the end."""
        ...

    async def close(self) -> None:
        """Let go of what was opened."""
        ...


class StateSource(ByteSource, StateBytes, Protocol):
    """The bytes of a state, as its manifest lays them out."""

    @property
    def segment(self) -> SegmentRef | None:
        """The shared-memory segment that holds exactly these bytes; None where they lie elsewhere."""
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

    async def adopt(self, segment: SegmentRef) -> None:
        """Take all bytes from a segment instead of chunks; its maker may let go of it afterwards.

        Raises:
            MemoryNotShared: it cannot be opened here, or by this store; chunks may come instead.
            InvalidField: it has another size than the state.
            StreamOutOfOrder: chunks came before it.
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

    async def load(self) -> list[Record | NewestMark]:
        """Remove what was never committed, and return the records and marks of all that was. Call once, first."""
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

    async def mark_newest(self, mark: NewestMark) -> None:
        """Remember a number, durably, in place of the adapter's mark before it."""
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

    async def open_adapter(self, base_model: str) -> tuple[StateSource, str]:
        """Open the adapter inside the archive, and tell which base model its folder names; empty: none.

        Args:
            base_model: The base model it belongs to.

        Raises:
            InvalidField: the archive holds no peft folder of safetensors with finite numbers.
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
            QuotaExceeded: it is new, and the tenant has too many that are not whole.
        """
        ...

    async def discard_older(self, moment: datetime) -> None:
        """Forget the uploads that nothing was added to since `moment`."""
        ...


class BaseModels(Protocol):
    """Knows the base models of the deployment."""

    def check_known(self, base_model: str) -> None:
        """Check that adapters of a base model are taken.

        Raises:
            BaseModelNotFound: they are not.
        """
        ...

    async def check_fit(self, manifest: WeightManifest, *, said: str) -> None:
        """Check an adapter against the base model that its manifest names.

        Args:
            manifest: Describes the adapter.
            said: The base model that its folder names; may be empty, or a name that nobody here knows.

        Raises:
            BaseModelNotFound: adapters of it are not taken.
            InvalidField: a layer is no part of the model or of another shape, a rank is too high, or the folder names
                another model of the deployment.
        """
        ...
