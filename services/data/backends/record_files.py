"""Stores records as JSON files, which are replaced atomically."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter

_Record = TypeVar('_Record')


class RecordFiles(Generic[_Record]):
    """Writes and reads records of one type."""

    def __init__(self, record_class: type[_Record]) -> None:
        """Create the files of `record_class`, a dataclass."""
        self._adapter = TypeAdapter(record_class)

    def write(self, path: Path, record: _Record) -> None:
        """Write a record durably; a crash leaves either the old content or the new."""
        staging = path.with_name(f'.{path.name}.new')
        with staging.open('wb') as file:
            file.write(self._adapter.dump_json(record))
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
        sync_folder(path.parent)

    def read_all(self, folder: Path, pattern: str) -> Iterator[_Record]:
        """Yield the records of the files that match `pattern`, in the order of their names."""
        for path in sorted(folder.glob(pattern)):
            yield self._adapter.validate_json(path.read_bytes())


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
