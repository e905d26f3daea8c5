"""The standard peft adapter folder: `adapter_model.safetensors` and `adapter_config.json`.

A folder written here appears whole or not at all, and loads in plain peft. The checkpoint
service's store has its own writer, which streams; the two share the file formats.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from twinkle.checkpoint_engine.errors import InvalidPeftFolder
from twinkle.checkpoint_engine.manifest import StateSection
from twinkle.checkpoint_engine.packing import pack_state
from twinkle.checkpoint_engine.peft_config import adapter_config_json
from twinkle.checkpoint_engine.peft_import import import_adapter
from twinkle.checkpoint_engine.safetensors_file import build_header, parse_header
from twinkle.data_format import LoraConfig, TensorData

ADAPTER_MODEL_FILE = 'adapter_model.safetensors'
"""The adapter's weights."""
ADAPTER_CONFIG_FILE = 'adapter_config.json'
"""The adapter's configuration."""
_PICKLE_FILE = 'adapter_model.bin'
SEED_KEY = 'twinkle.seed'
"""Where the seed is kept, in the metadata of the weights: peft's configuration has no place for it."""


def write_peft_folder(
    path: str | os.PathLike[str], tensors: Mapping[str, TensorData], config: LoraConfig, *, base_model: str
) -> None:
    """Write an adapter, replacing one of the same path.

    The files are made and synced in a folder beside `path` and then moved into place, so a
    crash leaves the old folder, or for an instant between two moves none, but never a part.

    Args:
        path: The folder to make. Its parents are made, too.
        tensors: The weights by peft's names. Only read.
        config: The adapter's configuration.
        base_model: Hub id or folder of the base model.

    Raises:
        InvalidManifest: there are no tensors, or a name is empty.
        OSError: the disk refused.
    """
    target = Path(path)
    state = pack_state(tensors, base_model=base_model, lora_config=config)
    header = build_header(state.manifest.entries_of(StateSection.ADAPTER), metadata=seed_metadata(config))
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f'.{target.name}.', dir=target.parent))
    try:
        folder = staging / 'new'
        folder.mkdir()
        _write_synced(folder / ADAPTER_MODEL_FILE, header, state.data)
        names = [entry.name for entry in state.manifest.tensors]
        _write_synced(
            folder / ADAPTER_CONFIG_FILE, adapter_config_json(config, base_model=base_model, tensor_names=names)
        )
        _sync_folder(folder)
        if target.exists():
            target.rename(staging / 'old')
        folder.rename(target)
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(staging)


def read_peft_folder(path: str | os.PathLike[str]) -> tuple[dict[str, TensorData], LoraConfig]:
    """Read an adapter that this module, peft or another tool wrote.

    Args:
        path: The folder.

    Returns:
        The weights by peft's canonical names, as views of one buffer, and the configuration.

    Raises:
        InvalidPeftFolder: a file is missing, is malformed, or asks for what is not supported.
    """
    folder = Path(path)
    _check_no_pickle(folder)
    data = memoryview(_read(folder / ADAPTER_MODEL_FILE))
    try:
        entries, metadata = parse_header(data)
        seed = metadata.get(SEED_KEY)
        tensors = {entry.name: TensorData(entry.dtype, entry.shape, data[entry.begin : entry.end]) for entry in entries}
    except ValueError as error:
        raise InvalidPeftFolder(ADAPTER_MODEL_FILE, str(error)) from None
    config_data = _read(folder / ADAPTER_CONFIG_FILE)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    try:
        adapter = import_adapter(config_data, shapes, seed=None if seed is None else int(seed))
    except ValueError as error:
        raise InvalidPeftFolder(ADAPTER_CONFIG_FILE, str(error)) from None
    return {adapter.names[name]: tensor for name, tensor in tensors.items()}, adapter.config


def seed_metadata(config: LoraConfig) -> dict[str, str]:
    """Return what to put into the metadata of the weights so that the seed is not lost."""
    return {} if config.seed is None else {SEED_KEY: str(config.seed)}


def _check_no_pickle(folder: Path) -> None:
    """Say what to do about a folder whose weights are pickled: reading one runs code of whoever wrote it."""
    if (folder / _PICKLE_FILE).exists() and not (folder / ADAPTER_MODEL_FILE).exists():
        raise InvalidPeftFolder(
            _PICKLE_FILE,
            f'is a pickle, which is never opened here; load it with peft where you trust it, and save it '
            f'with safe_serialization=True, which writes {ADAPTER_MODEL_FILE}',
        )


def _read(path: Path) -> bytes:
    """Read a file, or say that the folder lacks it."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InvalidPeftFolder(path.name, 'is missing') from None


def _write_synced(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file and wait until the disk has it."""
    with path.open('wb') as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Wait until the disk has a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
