"""Find the files of a subset and split in a dataset folder.

The `configs` in the README's metadata define the files, with the same rules as on the hubs. Without `configs`, the
names of folders and files determine subsets and splits.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from twinkle.dataset.errors import DatasetError
from twinkle.dataset.files import format_of
from twinkle.dataset.readme import Config, configs_of, dataset_name, patterns_of

DEFAULT_SUBSET = 'default'
"""Name of the default subset."""
_SPLITS = ('train', 'validation', 'valid', 'val', 'dev', 'test')
"""Names of splits that are recognized in paths."""
_SAVED_SPLITS, _SAVED_STATE = 'dataset_dict.json', 'state.json'
"""Files that `save_to_disk` of `datasets` adds to a folder with several splits and to the folder of one dataset."""
_SPLIT_WORD = re.compile(rf'(?<![a-z])({"|".join(_SPLITS)})(?![a-z])')


class NoDataFiles(DatasetError):
    """A folder has no data files in a known format for a split."""


def files_of(folder: Path, *, subset_name: str, split: str) -> list[Path]:
    """Return the data files of one subset and split, sorted by path; those of `save_to_disk` in the order of rows.

    Raises:
        DatasetError: the subset or split does not exist (the message lists the existing ones), it has no data files, a
            folder that `save_to_disk` wrote is incomplete, or the README is not valid.
    """
    configs = _configs_with_files(folder)
    if configs:
        return _files_of_config(folder, configs, subset_name, split)
    if (folder / _SAVED_SPLITS).is_file() or (folder / _SAVED_STATE).is_file():
        return _saved_files(folder, subset_name=subset_name, split=split)
    root = folder
    if subset_name != DEFAULT_SUBSET:
        root = folder / subset_name
        if not root.is_dir() or not root.resolve().is_relative_to(folder.resolve()):
            known = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith('.'))
            raise DatasetError(
                f'subset {subset_name!r} does not exist in {folder.name}; it has: {", ".join(known) or "no subsets"}'
            )
    candidates = _data_files(root.rglob('*'))
    by_split: dict[str, list[Path]] = {}
    for path in candidates:
        found = _SPLIT_WORD.findall(str(path.relative_to(root)).lower())
        by_split.setdefault(found[-1] if found else '', []).append(path)
    if split in by_split:
        return by_split[split]
    # If no file name contains a split, all files are the train split.
    if split == 'train' and set(by_split) == {''}:
        return by_split['']
    known = ', '.join(sorted(name or 'files without a split in their name' for name in by_split)) or 'no data files'
    raise (DatasetError if by_split else NoDataFiles)(
        f'split {split!r} does not exist in {folder.name}; it has: {known}'
    )


def has_configs(folder: Path) -> bool:
    """Return whether the README of a folder defines the files of its subsets and splits."""
    return bool(_configs_with_files(folder))


def _saved_files(folder: Path, *, subset_name: str, split: str) -> list[Path]:
    """Return the files of a folder written by `save_to_disk` of `datasets`, for one dataset or for several splits."""
    if subset_name != DEFAULT_SUBSET:
        raise DatasetError(
            f'subset {subset_name!r} does not exist in {folder.name}: save_to_disk stores no subsets; omit subset_name'
        )
    splits = _saved_list(folder / _SAVED_SPLITS, 'splits') if (folder / _SAVED_SPLITS).is_file() else None
    if splits is not None:
        _refuse_split(folder, split, [str(name) for name in splits])
        folder = folder / Path(split).name
    state = _read_json(folder / _SAVED_STATE)
    if splits is None and split != 'train':
        # 'train' is the default, so it selects the saved rows regardless of their split.
        _refuse_split(folder, split, [str(state.get('_split') or 'train')])
    if state.get('_indices_data_files'):
        raise DatasetError(
            f'{folder.name} was saved with an indices mapping of its rows; save it after flatten_indices()'
        )
    entries = cast('list[dict[str, Any]]', _saved_list(folder / _SAVED_STATE, '_data_files'))
    if not all(isinstance(entry, dict) for entry in entries):  # pyright: ignore[reportUnnecessaryIsInstance] (JSON)
        raise DatasetError(f'{folder.name}/{_SAVED_STATE} does not list data files; save the dataset again')
    files = [folder / Path(str(entry.get('filename'))).name for entry in entries]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DatasetError(f'data files of {folder.name} are missing: {", ".join(missing)}; save the dataset again')
    if not files:
        raise DatasetError(f'{folder.name} was saved without rows; save a dataset that has rows')
    return files


def _refuse_split(folder: Path, split: str, known: list[str]) -> None:
    if split not in known:
        names = ', '.join(known) or 'no splits'
        raise DatasetError(f'split {split!r} does not exist in {folder.name}; it has: {names}')


def _saved_list(path: Path, name: str) -> list[Any]:
    found: Any = _read_json(path).get(name)
    if not isinstance(found, list):
        raise DatasetError(f'{path.parent.name}/{path.name} has no {name}; save the dataset again')
    return cast('list[Any]', found)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise DatasetError(f'{path.parent.name}/{path.name} cannot be read; save the dataset again') from error
    return cast('dict[str, Any]', content) if isinstance(content, dict) else {}


def _data_files(paths: Iterable[Path]) -> list[Path]:
    is_hidden = re.compile(r'^[._]|^(dataset_infos|dataset_info|config|state)\.json$')
    return sorted(path for path in paths if path.is_file() and format_of(path) and not is_hidden.search(path.name))


def _configs_with_files(folder: Path) -> list[Config]:
    return [config for config in configs_of(folder) if config.get('data_files')]


def _files_of_config(folder: Path, configs: list[Config], subset_name: str, split: str) -> list[Path]:
    names = [str(config.get('config_name', DEFAULT_SUBSET)) for config in configs]
    is_default = [bool(config.get('default')) for config in configs]
    if subset_name in names:
        chosen = configs[names.index(subset_name)]
    elif subset_name == DEFAULT_SUBSET and (len(configs) == 1 or any(is_default)):
        chosen = configs[is_default.index(True) if any(is_default) else 0]
    else:
        raise DatasetError(f'subset {subset_name!r} does not exist in {folder.name}; it has: {", ".join(names)}')
    patterns = patterns_of(dataset_name(folder), chosen)
    if split not in patterns:
        raise DatasetError(f'split {split!r} does not exist in {folder.name}; it has: {", ".join(sorted(patterns))}')
    try:
        files = _data_files(path for pattern in patterns[split] for path in folder.glob(pattern))
    except ValueError as error:
        raise DatasetError(
            f'{dataset_name(folder)} has a README with an invalid pattern: {error}; correct it'
        ) from error
    # The files of a cache are links. A link elsewhere may belong to another dataset, so the path must be inside, too.
    inside = [
        path for path in files
        if '..' not in path.relative_to(folder).parts
        and (path.resolve().is_relative_to(folder.resolve()) or path.is_symlink())
    ]  # fmt: skip
    if not inside:
        raise NoDataFiles(f'{folder.name} has no data files that match {", ".join(patterns[split])}')
    return inside
