"""Stores records as JSON files, which are replaced atomically."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import structlog
from pydantic import TypeAdapter

from twinkle_services.kit.checksums import checked, with_checksum

_log = structlog.get_logger('data')
_Record = TypeVar('_Record')


class RecordFiles(Generic[_Record]):
    """Writes and reads records of one type."""

    def __init__(self, record_class: type[_Record]) -> None:
        """Create a reader and writer of records; `record_class` is their dataclass."""
        self._adapter = TypeAdapter(record_class)

    def write(self, path: Path, record: _Record) -> None:
        """Write a record durably; a crash or an error of the disk leaves either the old content or the new."""
        staging = path.with_name(f'.{path.name}.new')
        try:
            with staging.open('wb') as file:
                file.write(with_checksum(self._adapter.dump_json(record)))
                file.flush()
                os.fsync(file.fileno())
            staging.replace(path)
        except OSError:
            with suppress(OSError):
                staging.unlink()
            raise
        sync_folder(path.parent)

    def read_all(self, folder: Path, pattern: str) -> Iterator[tuple[Path, _Record | None]]:
        """Yield the files that match `pattern`, sorted by name, with their records or None for damaged records."""
        for path in sorted(folder.glob(pattern)):
            try:
                yield path, self._adapter.validate_json(checked(path.read_bytes()))
            except (ValueError, OSError) as error:
                _log.error('stored record damaged', path=str(path), error=str(error))
                yield path, None


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
