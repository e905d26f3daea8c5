"""Stores snapshots as safetensors files; the database stores their digests."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from twinkle.checkpoint_engine import StateSection, TensorEntry, build_header, parse_header
from twinkle.data_format import LoraConfig, TensorData
from twinkle_services.kit.failpoints import reach
from twinkle_services.kit.ids import new_id
from twinkle_services.model.backends.journal.files import Folder
from twinkle_services.model.domain.engine import AdapterState

_PREFIXES = {'adapter/': StateSection.ADAPTER, 'trainer/': StateSection.TRAINER}
"""Section of a tensor, by the prefix of its name in a snapshot file."""


class SnapshotDamaged(Exception):
    """A snapshot is missing, or its content does not match its digest."""


@dataclass(frozen=True)
class SnapshotFile:
    """Name and digest of a snapshot file."""

    name: str
    digest: str


class SnapshotFiles:
    """Snapshot files in one folder. Concurrency: thread-safe."""

    def __init__(self, path: Path, *, sync: Callable[[int], None]) -> None:
        self._folder = Folder(path, sync=sync)

    def write(self, state: AdapterState) -> SnapshotFile:
        """Write a state durably; the next start deletes the file unless a row refers to it.

        Raises:
            OSError: Writing failed.
        """
        tensors = {
            **{f'adapter/{name}': tensor for name, tensor in state.adapter.items()},
            **{f'trainer/{name}': tensor for name, tensor in state.trainer.items()},
        }
        parts: list[bytes | memoryview] = [build_header(_entries(tensors))]
        parts.extend(tensor.data for tensor in tensors.values())
        hasher = blake3()
        for part in parts:
            hasher.update(part)
        file = SnapshotFile(f'{new_id("sn")}.safetensors', hasher.hexdigest())
        self._folder.write(file.name, parts)
        reach('snapshot.written')
        return file

    def read(self, file: SnapshotFile, *, lora_config: LoraConfig, step_count: int) -> AdapterState:
        """Return the state in a file, without `full_parameters`, which the file does not contain.

        Args:
            file: Name and digest of the file.
            lora_config: Configuration from the record of the adapter.
            step_count: Number of steps from the record of the adapter.

        Raises:
            SnapshotDamaged: The file is missing or damaged.
            OSError: The disk failed.
        """
        try:
            data = self._folder.read(file.name)
        except FileNotFoundError as error:
            raise SnapshotDamaged(f'snapshot {file.name} is missing') from error
        if blake3(data).hexdigest() != file.digest:
            raise SnapshotDamaged(f'snapshot {file.name} is damaged: its digest does not match')
        tensors = _tensors(data)
        return AdapterState(
            lora_config=lora_config,
            adapter=_section(tensors, 'adapter/'),
            trainer=_section(tensors, 'trainer/'),
            step_count=step_count,
        )

    def adopt(self, source: Path) -> None:
        """Add a snapshot of another journal durably. A missing file is ignored here; a restore reports it.

        Raises:
            OSError: Writing failed.
        """
        with suppress(FileNotFoundError):
            self._folder.adopt(source)

    def drop(self, name: str) -> None:
        """Delete a file if it exists."""
        self._folder.drop(name)

    def sweep(self, used_names: set[str]) -> int:
        """Delete all files that are not in `used_names`; call this before the first `write`."""
        return self._folder.sweep(used_names)


def _entries(tensors: Mapping[str, TensorData]) -> list[TensorEntry]:
    entries, offset = list[TensorEntry](), 0
    for name, tensor in tensors.items():
        section = _PREFIXES[name[: name.index('/') + 1]]
        entries.append(TensorEntry(name, tensor.dtype, tensor.shape, offset, len(tensor.data), section))
        offset += len(tensor.data)
    return entries


def _tensors(data: bytes) -> dict[str, TensorData]:
    try:
        entries, _ = parse_header(data)
    except ValueError as error:
        raise SnapshotDamaged(str(error)) from error
    view = memoryview(data)
    return {entry.name: TensorData(entry.dtype, entry.shape, view[entry.begin : entry.end]) for entry in entries}


def _section(tensors: Mapping[str, TensorData], prefix: str) -> dict[str, TensorData]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
