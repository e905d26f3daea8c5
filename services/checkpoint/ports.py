"""Ports of the checkpoint service: a store of states, byte sources, uploads, and base models.

Every store passes tests/contract/checkpoint; the store in memory is the reference for the others.
"""

from datetime import datetime
from typing import Protocol

from services.checkpoint.domain import CheckpointKey, NewestMark, Record, VersionKey
from services.kit.weights import SegmentRef, StateBytes
from twinkle.checkpoint_engine import StateChunk, WeightManifest


class ByteSource(Protocol):
    """Bytes that can be read at any offset, until closed, even if the state is deleted in the meantime.

    Concurrency: one `read` at a time.
    """

    @property
    def size_bytes(self) -> int:
        """Number of bytes."""
        ...

    async def read(self, offset: int, length: int) -> bytes | memoryview:
        """Return `length` bytes from `offset` on, or fewer at the end."""
        ...

    async def close(self) -> None:
        """Release the source."""
        ...


class StateSource(ByteSource, StateBytes, Protocol):
    """The bytes of a state, in the layout of its manifest."""

    @property
    def segment(self) -> SegmentRef | None:
        """Shared-memory segment with exactly these bytes; None if they are stored elsewhere."""
        ...


class StateWriter(Protocol):
    """Receives the chunks of one state, which is not visible before `commit` has returned.

    Concurrency: one call at a time; `discard` may follow a cancelled call.
    """

    @property
    def folder(self) -> str:
        """PEFT folder that the state becomes, if the store is a local disk; empty otherwise."""
        ...

    async def add(self, chunk: StateChunk) -> None:
        """Add the next chunk; a refused chunk changes nothing.

        Raises:
            ChunkCorrupt: The bytes do not match the checksum.
            StreamOutOfOrder: The chunk overlaps earlier ones or leaves a gap.
            InvalidField: The chunk extends beyond the state.
        """
        ...

    async def adopt(self, segment: SegmentRef) -> None:
        """Take all bytes from a segment instead of chunks; its creator may remove it afterwards.

        Raises:
            MemoryNotShared: This store cannot open the segment; the caller may send chunks instead.
            InvalidField: The size of the segment differs from the size of the state.
            StreamOutOfOrder: Chunks were added before.
        """
        ...

    async def commit(self, record: Record) -> None:
        """Make the state durable and visible under the record's key, replacing an earlier state.

        Raises:
            StreamOutOfOrder: Bytes are missing.
            DigestMismatch: The bytes do not match the manifest's digest.
        """
        ...

    async def discard(self) -> None:
        """Remove the written bytes unless they were committed."""
        ...


class StateStore(Protocol):
    """Stores states with their records."""

    async def load(self) -> list[Record | NewestMark]:
        """Remove uncommitted states and return all records and marks; call once, before any other method."""
        ...

    def begin(self, key: VersionKey | CheckpointKey, manifest: WeightManifest) -> StateWriter:
        """Return a writer for a state; the store does not change before the writer's first call."""
        ...

    async def open_state(self, key: VersionKey | CheckpointKey, *, is_adapter_only: bool) -> StateSource:
        """Open a state.

        Args:
            key: Key of the state.
            is_adapter_only: Whether to omit the trainer's section; the source's manifest then describes the rest.

        Raises:
            VersionNotFound, CheckpointNotFound: The state does not exist.
        """
        ...

    async def open_archive(self, key: CheckpointKey) -> ByteSource:
        """Open a checkpoint as a tar archive of its PEFT folder; the bytes are the same at every call.

        Raises:
            CheckpointNotFound: The checkpoint does not exist.
        """
        ...

    async def update(self, record: Record) -> None:
        """Replace the record of a committed state."""
        ...

    async def mark_newest(self, mark: NewestMark) -> None:
        """Store a mark durably, replacing the adapter's earlier mark."""
        ...

    async def delete(self, key: VersionKey | CheckpointKey) -> None:
        """Remove a state and its record; does nothing if it does not exist."""
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
    """The base models of the deployment."""

    def check_known(self, base_model: str) -> None:
        """Check that adapters of a base model are accepted.

        Raises:
            BaseModelNotFound: They are not.
        """
        ...

    async def check_fit(self, manifest: WeightManifest, *, said: str) -> None:
        """Check an adapter against the base model that its manifest names.

        Args:
            manifest: Manifest of the adapter.
            said: Base model that the adapter's folder names; may be empty or unknown.

        Raises:
            BaseModelNotFound: Adapters of the base model are not accepted.
            InvalidField: A layer is not part of the model or has another shape, a rank is too high, or the folder names
                another model of the deployment.
        """
        ...
