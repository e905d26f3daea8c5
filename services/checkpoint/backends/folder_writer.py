"""Writes one state into a peft folder as its chunks come, and commits it with its record.

The weights' bytes go straight into `adapter_model.safetensors`, or `model.safetensors` where there is
no adapter, the trainer's into `trainer_state.safetensors`; neither is ever whole in memory. What makes
the state exist is the record beside the folder, written last.
"""

from threading import Lock
from typing import IO

from blake3 import blake3

from services.checkpoint.backends.checked_chunks import domain_errors
from services.checkpoint.backends.disk import Disk
from services.checkpoint.backends.open_folders import OpenFolders
from services.checkpoint.backends.record_json import manifest_to_json, record_from_json, record_to_json
from services.checkpoint.domain import Checkpoint, Record
from services.kit.errors import MemoryNotShared
from services.kit.ids import new_id
from services.kit.weights import SegmentRef
from services.kit.worker import Threads
from twinkle.checkpoint_engine import (
    ChunkVerifier,
    StateChunk,
    StateSection,
    WeightManifest,
    build_header,
    description_files,
    weights_file,
    weights_header,
)

TRAINER_STATE_FILE = 'trainer_state.safetensors'
"""What a trainer needs to resume, beside the peft files; peft does not look at it."""
MANIFEST_FILE = 'manifest.json'
"""The order of the tensors in the state, and the digests."""
RECORD_FILE = 'record.json'
"""Stands beside the folder that it makes visible."""


class FolderWriter:
    """One state on its way to the disk. All methods but the properties work in threads."""

    def __init__(
        self, disk: Disk, slot: str, manifest: WeightManifest, *, threads: Threads, folders: OpenFolders
    ) -> None:
        """Write into a new folder of `slot`; nothing is touched before the first call."""
        self._disk = disk
        self._slot = slot
        self._generation = new_id('st')
        self._manifest = manifest
        self._adapter_bytes = manifest.weights_size_bytes
        self._threads = threads
        self._folders = folders
        self._verifier = ChunkVerifier(manifest.size_bytes, manifest.digest)
        self._adapter_hasher = blake3()
        self._files: list[IO[bytes]] = []
        self._is_over = False
        # `discard` may come while the thread of a cancelled call is still writing.
        self._lock = Lock()

    @property
    def folder(self) -> str:
        """The peft folder it becomes, where the disk is local; else empty."""
        return self._disk.local_path(self._name())

    async def add(self, chunk: StateChunk) -> None:
        """Take the next chunk; see the port."""
        await self._threads.run(self._add, chunk)

    async def adopt(self, segment: SegmentRef) -> None:
        """Refuse: a disk shares no memory."""
        raise MemoryNotShared()

    async def commit(self, record: Record) -> None:
        """Make the state durable and visible; see the port."""
        await self._threads.run(self._commit, record)

    async def discard(self) -> None:
        """Remove what was written, unless it was committed."""
        await self._threads.run(self._discard)

    def _add(self, chunk: StateChunk) -> None:
        with self._lock, domain_errors():
            self._open()
            self._verifier.accept(chunk)
            view = memoryview(chunk.data)
            boundary = max(self._adapter_bytes - chunk.offset, 0)
            adapter_part, trainer_part = view[:boundary], view[boundary:]
            self._files[0].write(adapter_part)
            if self._manifest.is_trainer_included:
                self._adapter_hasher.update(adapter_part)
            if trainer_part:
                self._files[1].write(trainer_part)

    def _commit(self, record: Record) -> None:
        with self._lock, domain_errors():
            self._open()
            self._verifier.finish()
            disk = self._disk if outlives_machine(record) else self._disk.hasty()
            for file in self._files:
                disk.close_synced(file)
            self._write_descriptions(disk)
            disk.sync_folder(self._name())
            replaced = committed_generation(disk, self._slot)
            disk.replace(f'{self._slot}/{RECORD_FILE}', record_to_json(record, generation=self._generation))
            self._is_over = True
            if replaced is not None:
                self._folders.remove(f'{self._slot}/{replaced}')

    def _discard(self) -> None:
        with self._lock:
            if not self._is_over:
                self._is_over = True
                for file in self._files:
                    self._disk.abandon(file)
                self._disk.remove(self._name())

    def _open(self) -> None:
        if self._is_over:
            raise RuntimeError('the writer was discarded or has committed')
        if self._files:
            return
        self._files.append(self._disk.open_to_write(self._name(weights_file(self._manifest))))
        self._files[0].write(weights_header(self._manifest))
        if self._manifest.is_trainer_included:
            self._files.append(self._disk.open_to_write(self._name(TRAINER_STATE_FILE)))
            self._files[1].write(build_header(self._manifest.entries_of(StateSection.TRAINER)))

    def _write_descriptions(self, disk: Disk) -> None:
        manifest = self._manifest
        adapter_digest = self._adapter_hasher.hexdigest() if manifest.is_trainer_included else manifest.digest
        for name, content in description_files(manifest).items():
            disk.write(self._name(name), content)
        disk.write(self._name(MANIFEST_FILE), manifest_to_json(manifest, adapter_digest=adapter_digest))

    def _name(self, file: str = '') -> str:
        folder = f'{self._slot}/{self._generation}'
        return f'{folder}/{file}' if file else folder


def outlives_machine(record: Record) -> bool:
    """Say whether a state is worth waiting for the disk: checkpoints and pinned versions are.

    The other versions outlive the process, and are soon replaced; a loss of power may cost them.
    """
    return isinstance(record, Checkpoint) or record.is_pinned


def committed_generation(disk: Disk, slot: str) -> str | None:
    """Return the folder within `slot` that holds the committed state; None where there is none."""
    try:
        data = disk.read(f'{slot}/{RECORD_FILE}')
    except FileNotFoundError:
        return None
    return record_from_json(data)[1]
