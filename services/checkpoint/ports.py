"""Ports of the checkpoint service: a store of states, byte sources, uploads, and base models.

Every store passes tests/contract/checkpoint. The store in memory is the reference for the others.
"""

from typing import Protocol

from twinkle.checkpoint_engine import StateChunk, WeightManifest
from twinkle_services.checkpoint.domain import Checkpoint, CheckpointKey, DamagedState, NewestMark, Record, VersionKey
from twinkle_services.kit.upload_folder import UploadChunk, UploadHeader
from twinkle_services.kit.weights import SegmentRef, StateBytes


class ByteSource(Protocol):
    """Bytes that can be read at any offset until the source is closed, even if the state is deleted before that.

    Concurrency: only one `read` may run at a time.
    """

    @property
    def size_bytes(self) -> int:
        """Number of bytes."""
        ...

    async def read(self, offset: int, length: int) -> bytes | memoryview:
        """Return `length` bytes from `offset` on, or fewer at the end."""
        ...

    async def close(self) -> None:
        """Close the source and release its resources."""
        ...


class StateSource(ByteSource, StateBytes, Protocol):
    """The bytes of a state, in the layout of its manifest."""

    @property
    def segment(self) -> SegmentRef | None:
        """Shared-memory segment with exactly these bytes; None if they are stored elsewhere."""
        ...


class StateWriter(Protocol):
    """Receives the chunks of one state, which `commit` makes visible.

    Concurrency: only one call may run at a time; `discard` may follow a cancelled call.
    """

    @property
    def folder(self) -> str:
        """Path of the state's PEFT folder on a local disk if `are_folders_shown` is set; empty otherwise."""
        ...

    async def add(self, chunk: StateChunk) -> None:
        """Add the next chunk. If a chunk is refused, the state is unchanged.

        Raises:
            ChunkCorrupt: The bytes do not match the checksum.
            StreamOutOfOrder: The chunk overlaps earlier ones or leaves a gap.
            InvalidField: The chunk extends beyond the state.
            DiskFull, StoreUnavailable: The disk has too little space, or cannot be used; discard the state.
        """
        ...

    async def adopt(self, segment: SegmentRef) -> None:
        """Take all bytes from a segment instead of chunks. The creator of the segment may remove it afterwards.

        Raises:
            MemoryNotShared: This store cannot open the segment; the caller may send chunks instead.
            InvalidField: The size of the segment differs from the size of the state.
            StreamOutOfOrder: Chunks have already been added.
            DiskFull, StoreUnavailable: See `add`.
        """
        ...

    async def commit(self, record: Record) -> None:
        """Make the state visible under the record's key, replacing an earlier state.

        Checkpoints and pinned versions are durable afterwards. Other versions may be lost in a power failure.

        Raises:
            StreamOutOfOrder: Bytes are missing.
            DigestMismatch: The bytes do not match the manifest's digest.
            DiskFull, StoreUnavailable: The disk has too little space, or cannot be used at the moment.
        """
        ...

    async def discard(self) -> None:
        """Remove the written bytes unless they were committed."""
        ...


class StateStore(Protocol):
    """Stores states with their records. Methods raise StoreUnavailable if the disk cannot be used at the moment."""

    async def load(self) -> list[Record | NewestMark | DamagedState]:
        """Remove uncommitted states and return all records and marks; call once, before any other method.

        A state whose record cannot be read is returned as a `DamagedState` and is not removed.
        """
        ...

    def begin(self, key: VersionKey | CheckpointKey, manifest: WeightManifest) -> StateWriter:
        """Return a writer for a state; the store does not change before the writer's first call."""
        ...

    async def open_state(self, key: VersionKey | CheckpointKey, *, is_adapter_only: bool) -> StateSource:
        """Open a state.

        Args:
            key: Key of the state.
            is_adapter_only: Whether to leave out the trainer's section, including in the source's manifest.

        Raises:
            VersionNotFound, CheckpointNotFound: The state does not exist.
            CheckpointDamaged: The files or the record of the state differ from the committed ones.
        """
        ...

    async def open_archive(self, checkpoint: Checkpoint) -> ByteSource:
        """Open a checkpoint as a tar archive of its PEFT folder with a model card.

        The bytes are the same at every call until the checkpoint is replaced. Configuration and card are computed from
        the manifest and the record, so folders of earlier releases have them too.

        Raises:
            CheckpointNotFound: The checkpoint does not exist.
            CheckpointDamaged: The files or the record of the checkpoint differ from the committed ones.
        """
        ...

    async def update(self, record: Record) -> None:
        """Replace the record of a committed state.

        Raises:
            VersionNotFound, CheckpointNotFound: The state does not exist.
        """
        ...

    async def mark_newest(self, mark: NewestMark) -> None:
        """Store a mark durably, replacing the adapter's earlier mark."""
        ...

    async def delete(self, key: VersionKey | CheckpointKey) -> None:
        """Remove a state and its record; do nothing if it does not exist."""
        ...


class Upload(Protocol):
    """An archive that is being received. The received bytes survive a broken stream and a restart.

    Concurrency: only one call may run at a time; `close` may follow a cancelled call.
    """

    @property
    def received_bytes(self) -> int:
        """Number of received bytes."""
        ...

    async def add(self, chunk: UploadChunk) -> None:
        """Add a chunk; skip bytes that were received before.

        Raises:
            ChunkCorrupt: The bytes do not match a checksum.
            StreamOutOfOrder: The chunk leaves a gap.
            InvalidField: The chunk exceeds the announced size, or the header has no digest and skipped bytes differ
                from those that were received before.
            StoreUnavailable: The disk cannot be used at the moment; nothing was stored.
        """
        ...

    async def verify(self) -> None:
        """Check that the complete archive has the digest of the header, if it has one.

        Raises:
            DigestMismatch: The digest differs. The upload was removed.
            StoreUnavailable: The disk cannot be used at the moment.
        """
        ...

    async def open_adapter(self, base_model: str) -> tuple[StateSource, str]:
        """Return the adapter in the archive, and the base model named in its configuration, which may be empty.

        Args:
            base_model: Base model of the adapter, as named in the request.

        Raises:
            InvalidField: The archive is not a PEFT folder of safetensors with finite numbers.
        """
        ...

    async def discard(self) -> None:
        """Remove the upload and its bytes."""
        ...

    async def close(self) -> None:
        """Allow another stream to continue the upload, even if the caller is cancelled."""
        ...


class UploadStore(Protocol):
    """Stores archives until they are complete."""

    async def open(self, tenant_id: str, header: UploadHeader) -> Upload:
        """Create an upload or continue an existing one.

        Raises:
            InUse: Another stream is sending this upload.
            InvalidField: Earlier streams have sent more bytes than the header announces.
            QuotaExceeded: The tenant has too many unfinished uploads, or too many bytes in them.
            DiskFull, StoreUnavailable: The disk has too little space, or cannot be used at the moment.
        """
        ...

    async def discard_expired(self) -> None:
        """Remove the expired uploads of all tenants; an open upload does not expire."""
        ...


class BaseModels(Protocol):
    """The base models of the deployment."""

    def known_name(self, base_model: str) -> str:
        """Return the name of a base model in this deployment, which may differ from `base_model` in a hub prefix.

        Raises:
            BaseModelNotFound: Adapters of the base model are not accepted.
        """
        ...

    async def check_fit(self, manifest: WeightManifest, *, stated_base_model: str) -> None:
        """Check that an adapter fits the base model named in its manifest.

        Args:
            manifest: Manifest of the adapter.
            stated_base_model: Base model named in the adapter's configuration; may be empty or unknown.

        Raises:
            BaseModelNotFound: Adapters of the base model are not accepted.
            InvalidField: A layer is not part of the model or has a different shape, a rank is too high, or the
                configuration names another model of the deployment.
            ServiceUnreachable: The shapes of the base model could not be read.
        """
        ...
