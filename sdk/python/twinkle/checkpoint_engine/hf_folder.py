"""A model folder in the Hugging Face layout: its files, and the position of each tensor in them.

Weights files are read only up to the end of their headers. Pickled weights are never opened.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from twinkle.checkpoint_engine.errors import InvalidModelFolder
from twinkle.checkpoint_engine.safetensors_file import FileEntry, parse_header

CONFIG_FILE = 'config.json'
"""File with the model's architecture."""
INDEX_FILE = 'model.safetensors.index.json'
"""File that maps tensors to shards, in a model with several shards."""
SINGLE_FILE = 'model.safetensors'
"""Weights file of a model with a single shard."""

_LENGTH_BYTES = 8
"""Size of the field before a safetensors header that contains the header's length."""
_COMPANIONS = ('*.json', '*.txt', '*.model', '*.jinja', 'LICENSE*')
"""Patterns of the files that `ModelFolder.companions` lists."""


@dataclass(frozen=True)
class Shard:
    """One weights file."""

    path: Path
    entries: tuple[FileEntry, ...]
    """Tensors of the file, in order of offset."""
    metadata: Mapping[str, str]

    @property
    def size_bytes(self) -> int:
        """Size of the file's tensors."""
        return sum(entry.end - entry.begin for entry in self.entries)


@dataclass(frozen=True)
class ModelFolder:
    """A model folder whose headers were read and checked."""

    config: Mapping[str, Any]
    """Content of `config.json`."""
    shards: tuple[Shard, ...]
    """Weights files, sorted by name."""
    companions: tuple[Path, ...]
    """Tokenizer and other configuration files, which are copied unchanged. `config.json` and code are excluded."""
    is_indexed: bool
    """Whether the folder has an index file."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> 'ModelFolder':
        """Read the headers of a model folder.

        Raises:
            InvalidModelFolder: a file is missing or malformed, or the weights are quantized.
        """
        folder = Path(path)
        config = _read_json(folder / CONFIG_FILE)
        if config.get('quantization_config') is not None:
            raise InvalidModelFolder(CONFIG_FILE, 'has quantized weights; use the original model folder')
        names, is_indexed = _shard_names(folder)
        shards = tuple(_read_shard(folder / name) for name in names)
        excluded = {CONFIG_FILE, INDEX_FILE}
        companions = {file for pattern in _COMPANIONS for file in folder.glob(pattern) if file.name not in excluded}
        return cls(config, shards, tuple(sorted(companions)), is_indexed)

    @cached_property
    def entries(self) -> Mapping[str, FileEntry]:
        """All tensors, by name."""
        return {entry.name: entry for shard in self.shards for entry in shard.entries}

    @property
    def size_bytes(self) -> int:
        """Size of all tensors."""
        return sum(shard.size_bytes for shard in self.shards)

    def config_in(self, dtype: str | None) -> dict[str, Any]:
        """Return the configuration of the model with weights of the given dtype; None keeps the dtype."""
        if dtype is None:
            return dict(self.config)
        # Transformers 5 uses `dtype`, older versions `torch_dtype`.
        keys = [name for name in ('dtype', 'torch_dtype') if name in self.config] or ['dtype']
        return {**self.config, **dict.fromkeys(keys, dtype)}


def _shard_names(folder: Path) -> tuple[list[str], bool]:
    if (folder / INDEX_FILE).exists():
        weight_map = _read_json(folder / INDEX_FILE).get('weight_map')
        if not isinstance(weight_map, dict):
            raise InvalidModelFolder(INDEX_FILE, 'has no weight_map')
        names = sorted({str(name) for name in cast(dict[str, Any], weight_map).values()})
        if any(Path(name).name != name for name in names):
            raise InvalidModelFolder(INDEX_FILE, 'lists a file outside the folder')
        return names, True
    if (folder / SINGLE_FILE).exists():
        return [SINGLE_FILE], False
    if any(folder.glob('*.bin')):
        raise InvalidModelFolder(
            SINGLE_FILE, 'is missing; pickled weights (*.bin) are not supported, save the model as safetensors'
        )
    raise InvalidModelFolder(SINGLE_FILE, 'is missing; check the folder, or save the model as safetensors')


def _read_shard(path: Path) -> Shard:
    try:
        with path.open('rb') as file:
            length = file.read(_LENGTH_BYTES)
            header = length + file.read(min(int.from_bytes(length, 'little'), 100_000_000))
        entries, metadata = parse_header(header, file_bytes=path.stat().st_size)
    except FileNotFoundError:
        raise InvalidModelFolder(path.name, 'is missing') from None
    except ValueError as error:
        raise InvalidModelFolder(path.name, str(error)) from None
    return Shard(path, tuple(entries), metadata)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InvalidModelFolder(path.name, 'is missing') from None
    except (ValueError, RecursionError):
        raise InvalidModelFolder(path.name, 'is not JSON') from None
    if not isinstance(value, dict):
        raise InvalidModelFolder(path.name, 'is not a JSON object')
    return cast(dict[str, Any], value)
