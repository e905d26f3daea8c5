"""Writes one state into a PEFT folder as its chunks arrive, and commits it with its record.

The weights are written to `adapter_model.safetensors`, or to `model.safetensors` for full-parameter weights, and the
trainer's section to `trainer_state.safetensors`. Neither section is collected in memory. The record next to the folder
is written last and makes the state visible.
"""

from contextlib import suppress
from threading import Lock
from typing import IO

import structlog
from blake3 import blake3

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
from twinkle_services.checkpoint.backends.disk import Disk
from twinkle_services.checkpoint.backends.errors import domain_errors
from twinkle_services.checkpoint.backends.open_folders import OpenFolders
from twinkle_services.checkpoint.backends.record_json import manifest_to_json, record_from_json, record_to_json
from twinkle_services.checkpoint.domain import Checkpoint, Record
from twinkle_services.kit.errors import MemoryNotShared
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.weights import SegmentRef
from twinkle_services.kit.worker import Threads

_log = structlog.get_logger('folders')

TRAINER_STATE_FILE = 'trainer_state.safetensors'
"""The trainer's section of a state, next to the PEFT files; PEFT ignores it."""
MANIFEST_FILE = 'manifest.json'
"""Manifest of the state, and the digest of its weights."""
DIGESTS_FILE = 'b3sums'
"""Digests of all other files of the folder when they were written, in the format of the command `b3sum --check`."""
RECORD_FILE = 'record.json'
"""Record of a committed state, next to the folder that it names."""


class FolderWriter:
    """Implements `StateWriter` on a disk, which is accessed in worker threads only."""

    def __init__(
        self, disk: Disk, slot: str, manifest: WeightManifest, *, threads: Threads, folders: OpenFolders
    ) -> None:
        """Create a writer for a new folder in `slot`; the disk is not accessed before the first call."""
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
        self._digests: dict[str, blake3] = {}
        """Hashers of the tensor files, by name."""
        self._is_closed = False
        # `discard` may run while the thread of a cancelled call is still writing.
        self._lock = Lock()

    @property
    def folder(self) -> str:
        return self._disk.local_path(self._name())

    async def add(self, chunk: StateChunk) -> None:
        await self._threads.run(self._add, chunk)

    async def adopt(self, segment: SegmentRef) -> None:
        """Raise `MemoryNotShared`: this store does not accept segments of shared memory."""
        raise MemoryNotShared()

    async def commit(self, record: Record) -> None:
        await self._threads.run(self._commit, record)

    async def discard(self) -> None:
        await self._threads.run(self._discard)

    def _add(self, chunk: StateChunk) -> None:
        with self._lock, domain_errors():
            self._open()
            self._verifier.accept(chunk)
            view = memoryview(chunk.data)
            boundary = max(self._adapter_bytes - chunk.offset, 0)
            adapter_part, trainer_part = view[:boundary], view[boundary:]
            self._write(0, adapter_part)
            if self._manifest.is_trainer_included:
                self._adapter_hasher.update(adapter_part)
            if trainer_part:
                self._write(1, trainer_part)

    def _commit(self, record: Record) -> None:
        with self._lock, domain_errors():
            self._open()
            self._verifier.finish()
            disk = self._disk if is_durable(record) else self._disk.unsynced()
            for file in self._files:
                disk.close_synced(file)
            self._write_descriptions(disk)
            disk.sync_folder(self._name())
            replaced = replaceable_generation(disk, self._slot)
            is_synced = self._write_record(disk, record)
            self._close()
            if replaced is not None and is_synced:
                # The next start removes the files that remain.
                with suppress(OSError):
                    self._folders.remove(f'{self._slot}/{replaced}')

    def _write_record(self, disk: Disk, record: Record) -> bool:
        """Write the record, which makes the state visible; return whether it is also synced.

        The replaced folder remains if the record is not synced, because a power failure may still undo the change.

        Raises:
            OSError: The record is not visible, or cannot be read.
        """
        data = record_to_json(record, generation=self._generation)
        try:
            return replace_record(disk, self._slot, data)
        except OSError:
            if content_differs(disk, f'{self._slot}/{RECORD_FILE}', data) is None:
                # The record cannot be read, so this folder may be the committed one and must not be removed.
                self._close()
            raise

    def _discard(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._close()
                for file in self._files:
                    self._disk.abandon(file)
                try:
                    self._disk.remove(self._name())
                except OSError as error:
                    # The next start removes the folder. The error must not replace the result of the call.
                    _log.error('discarded files remain', folder=self._name(), error=str(error))

    def _open(self) -> None:
        if self._is_closed:
            raise RuntimeError('the writer has already committed or was discarded')
        if self._files:
            return
        self._disk.check_free_space(self._manifest.size_bytes)
        self._folders.begin_writing(self._name())
        self._create(weights_file(self._manifest), weights_header(self._manifest))
        if self._manifest.is_trainer_included:
            self._create(TRAINER_STATE_FILE, build_header(self._manifest.entries_of(StateSection.TRAINER)))

    def _close(self) -> None:
        self._is_closed = True
        self._folders.end_writing(self._name())

    def _create(self, name: str, header: bytes) -> None:
        self._files.append(self._disk.open_to_write(self._name(name)))
        self._digests[name] = blake3()
        self._write(len(self._files) - 1, header)

    def _write(self, index: int, data: bytes | memoryview) -> None:
        self._files[index].write(data)
        list(self._digests.values())[index].update(data)

    def _write_descriptions(self, disk: Disk) -> None:
        manifest = self._manifest
        adapter_digest = self._adapter_hasher.hexdigest() if manifest.is_trainer_included else manifest.digest
        manifest_json = manifest_to_json(manifest, adapter_digest=adapter_digest)
        contents = {**description_files(manifest), MANIFEST_FILE: manifest_json}
        for name, content in contents.items():
            disk.write(self._name(name), content)
        hashers = self._digests | {name: blake3(content) for name, content in contents.items()}
        lines = [f'{hasher.hexdigest()}  {name}\n' for name, hasher in sorted(hashers.items())]
        disk.write(self._name(DIGESTS_FILE), ''.join(lines).encode())

    def _name(self, file: str = '') -> str:
        folder = f'{self._slot}/{self._generation}'
        return f'{folder}/{file}' if file else folder


def is_durable(record: Record) -> bool:
    """Return whether a state must survive a power failure: true for checkpoints and pinned versions.

    Other versions need to survive only a crash of the process, since they are soon replaced.
    """
    return isinstance(record, Checkpoint) or record.is_pinned


def replace_record(disk: Disk, slot: str, data: bytes) -> bool:
    """Write the record of a slot, and return whether it is also synced.

    A disk may fail after the record is visible. The change then counts as made, because the next start finds it.

    Raises:
        OSError: The record is not visible, or cannot be read.
    """
    name = f'{slot}/{RECORD_FILE}'
    try:
        disk.replace(name, data)
    except OSError as error:
        if content_differs(disk, name, data) is not False:
            raise
        _log.error('record not synced', slot=slot, error=str(error))
        return False
    return True


def content_differs(disk: Disk, name: str, data: bytes) -> bool | None:
    """Return whether a file is missing or its content differs from `data`; None if the file cannot be read."""
    try:
        return disk.read(name) != data
    except FileNotFoundError:
        return True
    except OSError:
        return None


def committed_generation(disk: Disk, slot: str) -> str | None:
    """Return the name of the folder in `slot` with the committed state; None if no state is committed.

    Raises:
        ValueError, KeyError, TypeError: The record is damaged.
    """
    try:
        data = disk.read(f'{slot}/{RECORD_FILE}')
    except FileNotFoundError:
        return None
    return record_from_json(data)[1]


def replaceable_generation(disk: Disk, slot: str) -> str | None:
    """Return the name of the folder with the committed state; None if there is no readable record."""
    try:
        return committed_generation(disk, slot)
    except (ValueError, KeyError, TypeError):
        return None
