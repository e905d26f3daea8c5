"""The durable store: a standard PEFT folder for each state, below one root.

Each state has a slot, the folder `states/<tenant>/<adapter>/{versions/<number>|weights/<name>}/`. The slot contains
`record.json` and a folder with the files of the state; the record's `generation` is the name of that folder. A folder
that no record names is the result of a crash, and `load` removes it. The mark `states/<tenant>/<adapter>/newest.json`
is written before the adapter's newest version is deleted.
"""

import asyncio
import errno
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import IO, TypeVar
from urllib.parse import quote, unquote

import structlog
from blake3 import blake3

from twinkle.checkpoint_engine import CHUNK_BYTES, WEIGHTS_FILES, WeightManifest, weights_file
from twinkle_services.checkpoint.backends.disk import Disk
from twinkle_services.checkpoint.backends.errors import not_found
from twinkle_services.checkpoint.backends.folder_writer import (
    DIGESTS_FILE,
    MANIFEST_FILE,
    RECORD_FILE,
    TRAINER_STATE_FILE,
    FolderWriter,
    committed_generation,
    is_durable,
    replace_record,
    replaceable_generation,
)
from twinkle_services.checkpoint.backends.open_folders import OpenFolders
from twinkle_services.checkpoint.backends.pieces import (
    Piece,
    PieceSource,
    StatePieceSource,
    archive_files,
    given_piece,
    tar_pieces,
)
from twinkle_services.checkpoint.backends.record_json import (
    manifest_from_json,
    mark_from_json,
    mark_to_json,
    record_from_json,
    record_to_json,
)
from twinkle_services.checkpoint.domain import (
    AdapterKey,
    Checkpoint,
    CheckpointKey,
    DamagedState,
    NewestMark,
    Record,
    VersionKey,
)
from twinkle_services.kit.errors import CheckpointDamaged
from twinkle_services.kit.worker import Threads

_log = structlog.get_logger('store')

_ROOT = 'states'
_SLOT_DEPTH = 4
"""Path components of a slot below the root: tenant, adapter, kind, and number or name."""

_MARK = 'newest.json'

_Key = VersionKey | CheckpointKey
_Source = TypeVar('_Source', bound=PieceSource)


class FolderStore:
    """Implements `StateStore` on a disk, which is accessed in worker threads only."""

    def __init__(self, disk: Disk, threads: Threads) -> None:
        self._disk = disk
        self._threads = threads
        self._folders = OpenFolders(disk)
        self._reported: set[_Key] = set()
        """States whose damage was logged."""

    async def load(self) -> list[Record | NewestMark | DamagedState]:
        names = await self._threads.run(self._names)
        # Read concurrently, since each read from a remote store takes a round trip.
        found = await asyncio.gather(*(self._threads.run(self._load_slot, slot, names[slot]) for slot in sorted(names)))
        return [item for item in found if item is not None]

    def begin(self, key: _Key, manifest: WeightManifest) -> FolderWriter:
        return FolderWriter(self._disk, _slot(key), manifest, threads=self._threads, folders=self._folders)

    async def open_state(self, key: _Key, *, is_adapter_only: bool) -> StatePieceSource:
        return await self._threads.run(self._open, key, partial(self._state, is_adapter_only=is_adapter_only))

    async def open_archive(self, checkpoint: Checkpoint) -> PieceSource:
        opener = partial(self._archive, checkpoint=checkpoint)
        return await self._threads.run(self._open, checkpoint.key, opener)

    async def update(self, record: Record) -> None:
        await self._threads.run(self._update, record)

    async def mark_newest(self, mark: NewestMark) -> None:
        name = f'{_adapter_folder(mark.adapter)}/{_MARK}'
        await self._threads.run(self._disk.replace, name, mark_to_json(mark))

    async def delete(self, key: _Key) -> None:
        await self._threads.run(self._delete, _slot(key))

    def _names(self) -> dict[str, set[str]]:
        """Remove unfinished uploads, and return the children of each slot. A mark counts as a slot without children."""
        self._disk.remove_unfinished_uploads(_ROOT)
        slots: defaultdict[str, set[str]] = defaultdict(set)
        for name in self._disk.names(_ROOT):
            parts = name.split('/')
            if len(parts) >= _SLOT_DEPTH or parts[-1] == _MARK:
                slots['/'.join((_ROOT, *parts[:_SLOT_DEPTH]))].update(parts[_SLOT_DEPTH : _SLOT_DEPTH + 1])
        return slots

    def _load_slot(self, slot: str, names: Iterable[str]) -> Record | NewestMark | DamagedState | None:
        """Load the record or mark of a slot, and remove the files that the record does not name.

        Returns None if the slot has no complete state, or if its mark or its name is damaged.
        """
        if slot.endswith(f'/{_MARK}'):
            return self._load_mark(slot)
        if RECORD_FILE not in names:
            self._clear(slot, names)
            return None
        try:
            record, generation = record_from_json(self._disk.read(f'{slot}/{RECORD_FILE}'))
        except (ValueError, KeyError, TypeError) as error:
            # The state is not removed, so that it can be inspected; it does not affect other states.
            return self._damaged_state(slot, error)
        if not is_durable(record) and not self._is_complete(f'{slot}/{generation}', record):
            _log.error('incomplete state removed', slot=slot)
            self._disk.remove(f'{slot}/{RECORD_FILE}')
            self._clear(slot, names)
            return None
        for name in set(names) - {RECORD_FILE, generation}:
            self._disk.remove(f'{slot}/{name}')
        if isinstance(record, Checkpoint):
            return replace(record, folder=self._disk.local_path(f'{slot}/{generation}'))
        return record

    def _damaged_state(self, slot: str, error: Exception) -> DamagedState | None:
        """Return the state of a slot with an unreadable record; None if the slot's name is damaged, too."""
        try:
            key = _key(slot)
        except ValueError:
            _log.error('unreadable record', slot=slot, error=str(error))
            return None
        self._damage(key, error)
        return DamagedState(key)

    def _damage(self, key: _Key, problem: object) -> CheckpointDamaged:
        """Log the damage of a state, but only once, and return the error for it."""
        if key not in self._reported:
            self._reported.add(key)
            _log.error('stored state damaged', slot=_slot(key), problem=str(problem))
        return CheckpointDamaged(_title(key))

    def _load_mark(self, name: str) -> NewestMark | None:
        """Return a mark; None if it is damaged.

        Without a mark, only the numbers up to the newest stored version count as used.
        """
        try:
            return mark_from_json(self._disk.read(name))
        except (ValueError, KeyError, TypeError) as error:
            _log.error('newest-version mark damaged', name=name, problem=str(error))
            return None

    def _is_complete(self, folder: str, record: Record) -> bool:
        """Return whether the files are large enough; a power failure may truncate those of an unpinned version."""
        try:
            stored_bytes = self._weights_bytes(folder)
            if isinstance(record, Checkpoint) and record.is_optimizer_included:
                stored_bytes += self._disk.size_bytes(f'{folder}/{TRAINER_STATE_FILE}')
        except FileNotFoundError:
            return False
        return stored_bytes > record.size_bytes

    def _weights_bytes(self, folder: str) -> int:
        for name in WEIGHTS_FILES:
            with suppress(FileNotFoundError):
                return self._disk.size_bytes(f'{folder}/{name}')
        return 0

    def _open(self, key: _Key, opener: Callable[[str], _Source]) -> _Source:
        """Open the committed folder with `opener` after verifying it; retry if it is replaced during the call.

        Raises:
            CheckpointDamaged: A file differs from the committed one, or is missing.
            VersionNotFound, CheckpointNotFound: No state is committed under the key.
        """
        slot = _slot(key)
        previous = None
        try:
            while (generation := committed_generation(self._disk, slot)) != previous:
                with suppress(FileNotFoundError):
                    return self._open_folder(f'{slot}/{generation}', opener)
                previous = generation
        except (ValueError, KeyError, TypeError) as error:
            raise self._damage(key, error) from error
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise self._damage(key, error) from error
        raise not_found(key) if previous is None else self._damage(key, 'a file is missing')

    def _verify(self, folder: str) -> None:
        """Compare the files of a folder with the digests stored when they were written.

        Raises:
            ValueError: A file differs or is missing.
        """
        try:
            content = self._disk.read(f'{folder}/{DIGESTS_FILE}').decode()
        except FileNotFoundError:
            # Folders of earlier releases have no digests; receivers verify their tensors.
            return
        digests = {name: digest for digest, _, name in (line.partition('  ') for line in content.splitlines())}
        if digests.keys() != set(self._disk.names(folder)) - {DIGESTS_FILE}:
            raise ValueError(f'the files that {DIGESTS_FILE} lists are not those in the folder')
        for name, digest in digests.items():
            if self._digest(f'{folder}/{name}') != digest:
                raise ValueError(f'{name} differs from the saved file')

    def _digest(self, name: str) -> str:
        hasher = blake3()
        with self._disk.open_to_read(name) as file:
            while data := file.read(CHUNK_BYTES):
                hasher.update(data)
        return hasher.hexdigest()

    def _open_folder(self, folder: str, opener: Callable[[str], _Source]) -> _Source:
        release = self._folders.hold(folder)
        try:
            self._verify(folder)
            source = opener(folder)
        except BaseException:
            release()
            raise
        source.on_close(release)
        return source

    def _state(self, folder: str, *, is_adapter_only: bool) -> StatePieceSource:
        manifest = manifest_from_json(self._disk.read(f'{folder}/{MANIFEST_FILE}'), is_adapter_only=is_adapter_only)
        weights_bytes = manifest.weights_size_bytes
        pieces = [self._tensor_bytes(f'{folder}/{weights_file(manifest)}', weights_bytes)]
        if manifest.is_trainer_included:
            pieces.append(self._tensor_bytes(f'{folder}/{TRAINER_STATE_FILE}', manifest.size_bytes - weights_bytes))
        return StatePieceSource(manifest, pieces, self._threads)

    def _tensor_bytes(self, name: str, size_bytes: int) -> Piece:
        """Return the part of a safetensors file that contains the tensors, after the header."""
        return Piece(size_bytes, self._disk.open_to_read(name), self._disk.size_bytes(name) - size_bytes)

    def _archive(self, folder: str, *, checkpoint: Checkpoint) -> PieceSource:
        manifest = manifest_from_json(self._disk.read(f'{folder}/{MANIFEST_FILE}'), is_adapter_only=True)
        # The archive contains only the files of a standard PEFT folder.
        files = [(name, *given_piece(data)) for name, data in archive_files(manifest, checkpoint).items()]
        weights = f'{folder}/{weights_file(manifest)}'
        file = self._disk.open_to_read(weights)
        files.append((weights_file(manifest), self._disk.size_bytes(weights), partial(_whole_file, file)))
        return PieceSource(tar_pieces(files), self._threads)

    def _update(self, record: Record) -> None:
        slot = _slot(record.key)
        generation = committed_generation(self._disk, slot)
        if generation is None:
            raise not_found(record.key)
        if is_durable(record):
            self._disk.sync_files(f'{slot}/{generation}')
        replace_record(self._disk, slot, record_to_json(record, generation=generation))

    def _delete(self, slot: str) -> None:
        """Delete a slot, its record first: if the process crashes in between, `load` removes the rest."""
        generation = replaceable_generation(self._disk, slot)
        self._remove_record(slot)
        try:
            self._clear(slot, self._children(slot) if generation is None else [generation])
        except OSError as error:
            # The state is deleted, so the call must not fail; the next start removes the files.
            _log.error('files of a deleted state remain', slot=slot, error=str(error))

    def _remove_record(self, slot: str) -> None:
        """Remove a slot's record.

        Raises:
            OSError: The record still exists.
        """
        try:
            self._disk.remove(f'{slot}/{RECORD_FILE}')
        except OSError as error:
            with suppress(FileNotFoundError):
                self._disk.read(f'{slot}/{RECORD_FILE}')
                raise
            _log.error('removal of a record reported an error', slot=slot, error=str(error))

    def _children(self, slot: str) -> set[str]:
        return {name.partition('/')[0] for name in self._disk.names(slot)}

    def _clear(self, slot: str, names: Iterable[str]) -> None:
        """Remove the files of a slot without a record, except folders that are being written.

        A folder that is being read is removed when its last reader closes.
        """
        for name in names:
            if not self._folders.is_being_written(f'{slot}/{name}'):
                self._folders.remove(f'{slot}/{name}')
        self._disk.remove_empty_folder(slot)


def _whole_file(file: IO[bytes], size_bytes: int) -> Piece:
    return Piece(size_bytes, file)


def _slot(key: _Key) -> str:
    location = f'versions/{key.version}' if isinstance(key, VersionKey) else f'weights/{key.name}'
    return f'{_adapter_folder(key.adapter)}/{location}'


def _key(slot: str) -> _Key:
    """Return the key of a slot; the inverse of `_slot`.

    Raises:
        ValueError: The path does not name a slot.
    """
    _, tenant_id, adapter_id, kind, name = slot.split('/')
    adapter = AdapterKey(unquote(tenant_id), unquote(adapter_id))
    return VersionKey(adapter, int(name)) if kind == 'versions' else CheckpointKey(adapter, name)


def _title(key: _Key) -> str:
    return key.checkpoint_id if isinstance(key, CheckpointKey) else f'{key.adapter.adapter_id} version {key.version}'


def _adapter_folder(adapter: AdapterKey) -> str:
    return f'{_ROOT}/{_safe(adapter.tenant_id)}/{_safe(adapter.adapter_id, unquoted=":")}'


def _safe(text: str, *, unquoted: str = '') -> str:
    """Return `text` quoted as one path component; characters in `unquoted` stay unquoted, to keep the name short."""
    quoted = quote(text, safe=unquoted)
    return quoted.replace('.', '%2E') if not quoted.strip('.') else quoted
