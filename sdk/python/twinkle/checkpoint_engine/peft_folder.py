"""Reading and writing of PEFT adapter folders: `adapter_model.safetensors` and `adapter_config.json`.

A written folder is always complete and can be loaded with PEFT. The checkpoint service has a separate, streaming writer
for the same file formats.
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
"""Name of the file with the adapter's weights."""
ADAPTER_CONFIG_FILE = 'adapter_config.json'
"""Name of the file with the adapter's configuration."""
_PICKLE_FILE = 'adapter_model.bin'
SEED_KEY = 'twinkle.seed'
"""Key of the seed in the metadata of the weights, because PEFT's configuration has no field for it."""


def write_peft_folder(
    path: str | os.PathLike[str], tensors: Mapping[str, TensorData], config: LoraConfig, *, base_model: str
) -> None:
    """Write an adapter folder, replacing an existing folder.

    The files are written and synced in a new folder inside a temporary folder next to `path`. The new folder is then
    renamed to `path`. A crash leaves the old or the new folder or, between the two renames, no folder at `path`; the
    old folder is then in the temporary folder. A crash never leaves an incomplete folder at `path`.

    Args:
        path: the folder to write. Missing parents are created.
        tensors: the weights by PEFT's names. Read-only.
        config: the adapter's configuration.
        base_model: hub id or folder of the base model.

    Raises:
        InvalidManifest: `tensors` is empty, or a name is empty or invalid.
        OSError: writing failed.
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
        replace_folder(target, folder, previous=staging / 'old')
        _sync_folder(target.parent)
    finally:
        # If the old folder could be neither replaced nor moved back, the staging folder has the only copy.
        if target.exists() or not (staging / 'old').exists():
            shutil.rmtree(staging)


def read_peft_folder(path: str | os.PathLike[str]) -> tuple[dict[str, TensorData], LoraConfig]:
    """Read an adapter folder that this module, PEFT or another tool wrote.

    Args:
        path: the folder.

    Returns:
        The weights by PEFT's canonical names, as views of one buffer, and the configuration.

    Raises:
        InvalidPeftFolder: a file is missing or malformed, or uses an unsupported feature.
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
    """Return the metadata entry that stores the seed with the weights."""
    return {} if config.seed is None else {SEED_KEY: str(config.seed)}


def _check_no_pickle(folder: Path) -> None:
    """Refuse pickled weights, because reading them can run arbitrary code."""
    if (folder / _PICKLE_FILE).exists() and not (folder / ADAPTER_MODEL_FILE).exists():
        raise InvalidPeftFolder(
            _PICKLE_FILE,
            f'is a pickle file, which is not supported; if you trust the file, load it with PEFT and save with '
            f'safe_serialization=True, which writes {ADAPTER_MODEL_FILE}',
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InvalidPeftFolder(path.name, 'is missing') from None


def _write_synced(path: Path, *parts: bytes | memoryview) -> None:
    with path.open('wb') as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def replace_folder(target: Path, new: Path, *, previous: Path) -> None:
    """Replace `target` with `new`. An existing target is moved to `previous`, and moved back if the replacement fails.

    Raises:
        OSError: a folder could not be moved.
    """
    if target.exists():
        target.rename(previous)
    try:
        new.rename(target)
    except BaseException:
        if previous.exists():
            previous.rename(target)
        raise


def _sync_folder(path: Path) -> None:
    """Sync a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
