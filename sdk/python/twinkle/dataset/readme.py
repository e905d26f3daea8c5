"""Read the README of a folder or repository, and check which files it names before any of them is looked up.

A README may define the files of subsets in its field `configs`. Its author is not trusted: the library `datasets` would
open absolute paths and addresses, so only paths and patterns inside of the folder or repository are accepted.
"""

import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import yaml

from twinkle.dataset.errors import DatasetError
from twinkle.hub import HubId

Config = dict[str, Any]
"""Definition of a subset in a README."""

_CARD, _STANDALONE = 'README.md', '.huggingface.yaml'
"""Files from which `datasets` reads definitions of subsets."""
_FRONT_MATTER = re.compile(rb'(\xef\xbb\xbf|\s)*---')
"""Beginning of a README with metadata."""
_UNREAD = re.compile(r'(\ufeff|\s)*---.*\n(\r?\n|([ \t#-]|\w[\w-]*[ \t]*:).*\n)*configs\s*:')
"""Metadata with configs in the text of a README, where it has no effect. Between --- and the configs, there are only
lines of YAML; other text follows a horizontal rule."""
_VERSION = re.compile(r'(\w[\w.+-]*)?')
"""Versions that are safe in the paths of the library's cache."""
_SHOWN_CHARACTERS = 200
"""Maximum length of a value in errors."""


def configs_of(folder: Path) -> list[Config]:
    """Return the definitions of subsets in the descriptions of a folder, as `datasets` reads them.

    Raises:
        DatasetError: a description is not valid, or names a file outside of the folder.
    """
    fields: Config = {}
    for file in (folder / _CARD, folder / _STANDALONE):
        if file.is_file():
            fields |= _fields_of(dataset_name(folder), file)
    return fields.get('configs') or []


def checked_configs(name: str, configs: Any) -> list[Config]:
    """Return the configs of a README after checking the files that they name.

    Args:
        name: the README and its folder or repository, for errors.
        configs: value of the README's field `configs`.

    Raises:
        DatasetError: a config is malformed, or names a file outside of the folder or repository.
    """
    if not isinstance(configs, list | None):
        raise _malformed(name, 'configs must be a list')
    for config in cast('list[Any]', configs or []):
        if not isinstance(config, dict):
            raise _malformed(name, 'each item of configs must have config_name and data_files')
        _check(name, cast('Config', config))
    return cast('list[Config]', configs or [])


def patterns_of(name: str, config: Config) -> dict[str, list[str]]:
    """Map each split name to file patterns; the hubs allow one pattern, a list, or one entry per split.

    Args:
        name: see `checked_configs`.
        config: an item of `configs`.

    Raises:
        DatasetError: `data_files` is malformed.
    """
    found: Any = config.get('data_files')
    if found is None or isinstance(found, str):
        return {'train': [found]} if found else {}
    patterns: dict[str, list[str]] = {}
    for entry in cast('list[Any]', found) if isinstance(found, list) else [None]:
        item = cast('Config', entry) if isinstance(entry, dict) else {'path': entry}
        path, split = item.get('path'), item.get('split', 'train')
        paths = cast('list[Any]', path if isinstance(path, list) else [path])
        if not (isinstance(split, str) and all(isinstance(part, str) for part in paths)):
            raise _malformed(name, f'config {_label(config)} needs data_files with paths, or with split and path')
        patterns.setdefault(split, []).extend(paths)
    return patterns


def dataset_name(folder: Path) -> str:
    """Return the name of a dataset for errors: `org/name` for a folder in the cache of Hugging Face's client."""
    snapshots, repository = folder.parent.name, folder.parent.parent.name
    is_cached = snapshots == 'snapshots' and repository.startswith('datasets--')
    return repository.removeprefix('datasets--').replace('--', '/') if is_cached else folder.name


def pinned_revision(
    name: str, *, revision: str | None, token: str | bool | None, endpoint: str, is_move_allowed: bool = True
) -> tuple[str, str]:
    """Return the full name and the commit of a dataset on Hugging Face, after checking its descriptions.

    Args:
        name: name of the repository.
        revision: branch, tag or commit. None for the default branch.
        token: access token; None for the one of this machine, and False for none.
        endpoint: address of the hub.
        is_move_allowed: whether the repository may have another name now. Default: True.

    Raises:
        RepositoryMoved: the repository has another name now, which is not allowed.
        DatasetError: the repository has no owner; see also `configs_of`.
        OSError, huggingface_hub.errors.HTTPError: the repository is not accessible, or the hub did not respond.
    """
    api: Any = importlib.import_module('huggingface_hub').HfApi(endpoint=endpoint, token=token)  # imported only here
    info = api.dataset_info(name, revision=revision)
    if not is_move_allowed:
        HubId('hf', name).refuse_moved(info.id)
    if '/' not in info.id:
        raise DatasetError(f'{name} has no owner; use a dataset whose name is org/name')
    names = {file.rfilename for file in info.siblings or ()}
    for file in sorted(names & {_CARD, _STANDALONE}):
        _fields_of(info.id, Path(api.hf_hub_download(info.id, file, repo_type='dataset', revision=info.sha)))
    return info.id, info.sha


def _fields_of(name: str, file: Path) -> Config:
    """Return the metadata in a description after checking its configs."""
    described, content = f'{file.name} of {name}', file.read_bytes()
    if file.name == _CARD and not _FRONT_MATTER.match(content):
        return {}
    try:
        found, text = _card_of(file) if file.name == _CARD else (yaml.safe_load(content), '')
    except (yaml.YAMLError, ValueError, TypeError) as error:
        problem = f'its metadata is not YAML with fields ({type(error).__name__}); correct or remove the metadata'
        raise _malformed(described, problem) from error
    if not isinstance(found, dict | None):
        raise _malformed(described, 'it must contain fields')
    if not found and _UNREAD.match(text):
        mark = '. Save the file without a byte order mark, which this huggingface_hub does not skip'
        problem = 'its configs must be between two lines ---, the first of them at the beginning'
        raise _malformed(described, problem + (mark if text.startswith('\ufeff') else ''))
    fields = cast('Config', found or {})
    checked_configs(described, fields.get('configs'))
    return fields


def _card_of(file: Path) -> tuple[Any, str]:
    """Return the metadata of a README, and its text, which includes metadata that is not between two lines ---."""
    # `datasets` reads READMEs with this class, so that both find the same fields.
    card: Any = importlib.import_module('huggingface_hub').DatasetCard.load(file)
    return card.data.to_dict(), card.text


def _check(name: str, config: Config) -> None:
    if not isinstance(config.get('config_name', ''), str | int | float):
        raise _malformed(name, 'config_name must be text')
    given: Iterable[Any] = (part for parts in patterns_of(name, config).values() for part in parts)
    for path in (*given, config.get('data_dir') or '.'):
        if not (isinstance(path, str) and _is_inside(path)):
            raise DatasetError(
                f'{name} has a config {_label(config)} that names {_shown(path)}; data_files and data_dir must be '
                'relative paths or patterns inside of the folder or repository'
            )
    version = config.get('version', '')
    if not (isinstance(version, str | int | float) and _VERSION.fullmatch(str(version))):
        raise _malformed(name, f'config {_label(config)} needs a version such as 1.0.0')


def _is_inside(pattern: str) -> bool:
    """Return whether a pattern is neither an address, a chain of addresses, an absolute path, nor leaves the folder."""
    try:
        is_address = bool(urlsplit(pattern).scheme) or '://' in pattern or '::' in pattern
    except ValueError:
        return False
    is_relative = bool(pattern) and pattern[0] not in '/\\' and '\0' not in pattern
    return is_relative and not is_address and '..' not in re.split(r'[/\\]', pattern)


def _label(config: Config) -> str:
    return _shown(config.get('config_name', 'default'))


def _shown(value: Any) -> str:
    """Return a value for errors; text of nested values could be much longer than the README."""
    return repr(value[:_SHOWN_CHARACTERS]) if isinstance(value, str) else f'a value of type {type(value).__name__}'


def _malformed(name: str, problem: str) -> DatasetError:
    return DatasetError(f'{name} is not valid: {problem}')
