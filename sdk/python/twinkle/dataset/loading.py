"""Read files and folders with the library `datasets`: as memory-mapped tables, or as streams.

The library converts files to Arrow files in its cache. Code in repositories is never run.
"""
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import glob
import importlib
import json
import os
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Protocol, cast

from twinkle.dataset.errors import DatasetError, UnreadableFile
from twinkle.dataset.hf import as_stored, library, rows_of_stream
from twinkle.dataset.layout import DEFAULT_SUBSET
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.readme import configs_of, dataset_name, pinned_revision
from twinkle.dataset.row_bounds import Row
from twinkle.dataset.tables import TableRows, joined
from twinkle.hub import DatasetNotFound, HubError, HubUnreachable, RepositoryMoved

_MODULES = {'.jsonl': 'json', '.json': 'json', '.parquet': 'parquet', '.csv': 'csv', '.arrow': 'arrow'}
"""Modules of the library that read files, by suffix. Folders with other files are read by the module it chooses."""
_CSV_OPTIONS: Mapping[str, Any] = {'keep_default_na': False, 'na_values': ['']}
"""Strings such as 'NA' and 'null' are kept; only an empty string becomes None."""
_INFERRED = frozenset({'csv', 'json'})
"""Modules that determine the types of columns from the first rows."""
_TYPES_CURE = (
    '; if later values of a column have another type than the first ones, give the types of all columns: '
    "DatasetMeta(..., options={'features': datasets.Features(...)})"
)
_HUB_PREFIX = 'hf://datasets/'
"""Beginning of the addresses of datasets on Hugging Face."""
_SPLIT = 'train'
"""Split under which the library reads a list of files."""


class Source(Protocol):
    """Files that are opened but not read."""

    def files(self) -> list[str]:
        """Return the paths or addresses of the files."""
        ...

    def rows(self) -> Sequence[Row]:
        """Return all rows.

        Raises:
            UnreadableFile: a file cannot be read.
        """
        ...

    def stream(self) -> Iterator[Row]:
        """Yield the rows, reading the files in pieces.

        Raises:
            UnreadableFile: a file cannot be read; raised during iteration.
        """
        ...


def read_rows(path: Path, file_format: str | None = None) -> Sequence[Row]:
    """Return the rows of a file, in order; they are loaded on access.

    Args:
        path: the file.
        file_format: a suffix without a dot, such as 'jsonl'. Default: the suffix of the path.

    Raises:
        MissingLibrary: `datasets` is not installed.
        UnreadableFile: the format is unknown, or the file does not have this format.
    """
    return source_of_files([path], file_format).rows()


def source_of_files(files: Sequence[Path], file_format: str | None = None, **options: Any) -> Source:
    """Return the source of data files, in order.

    Args:
        files: the files.
        file_format: suffix without a dot that replaces the suffixes of the files. Default: each file has its own.
        options: arguments of `load_dataset`.
    """
    grouped = groupby(files, lambda file: f'.{file_format}' if file_format else file.suffix.lower())
    parts = [_part(suffix, list(group), options) for suffix, group in grouped]
    return parts[0] if len(parts) == 1 else _Parts(parts)


def source_of_folder(folder: Path, meta: DatasetMeta, readers: Collection[str] | None = None) -> Source:
    """Return the source of a folder in any format and with any README that the library reads.

    Args:
        folder: the folder.
        meta: subset, split and options.
        readers: modules of the library that may read the files. Default: all.

    Raises:
        DatasetError: the library finds no data files, or the subset or split does not exist.
    """
    with _source_errors(folder.name, DatasetError):
        return _described(str(folder.resolve()), meta, readers)


def source_of_hub(
    name: str,
    meta: DatasetMeta,
    readers: Collection[str] | None = None,
    *,
    is_private_allowed: bool = True,
    is_move_allowed: bool = True,
) -> Source:
    """Return the source of a repository on Hugging Face, whose files are read over the network.

    Args:
        name: `org/name` of the repository.
        meta: subset, split and options.
        readers: modules of the library that may read the files. Default: all.
        is_private_allowed: whether the token of this machine is used. Default: True.
        is_move_allowed: see `twinkle.hub.resolve_dataset`. Default: True.

    Raises:
        RepositoryMoved: the repository is not public and has another name now, which is not allowed.
        DatasetNotFound: the repository does not exist or is not accessible.
        HubUnreachable: the hub did not respond, or the environment does not allow connections.
        DatasetError: the library finds no data files, or the subset or split does not exist.
    """
    token = meta.options.get('token') if is_private_allowed else False
    with _source_errors(name, DatasetError), _hub_errors(name):
        try:
            repository, commit = _pinned(name, meta, token=token, is_move_allowed=is_move_allowed or token is False)
        except RepositoryMoved as moved:
            token = False
            try:
                with _hub_errors(name):
                    repository, commit = _pinned(name, meta, token=token, is_move_allowed=True)
            except DatasetNotFound:
                raise moved from None
        options = {**meta.options, 'revision': commit, 'token': token}
        # A bare id could also be a folder of this machine, or a module of the library.
        return _described(f'{_HUB_PREFIX}{repository}', replace(meta, options=options), readers)


def _pinned(name: str, meta: DatasetMeta, *, token: str | bool | None, is_move_allowed: bool) -> tuple[str, str]:
    endpoint, revision = library().config.HF_ENDPOINT, meta.options.get('revision')
    return pinned_revision(name, revision=revision, token=token, endpoint=endpoint, is_move_allowed=is_move_allowed)


@contextmanager
def _hub_errors(name: str) -> Generator[None]:
    """Convert the errors of the library and of the hub's client about a repository."""
    errors = library().exceptions
    client: Any = importlib.import_module('huggingface_hub').errors  # imported only if needed
    try:
        yield
    except (errors.DatasetNotFoundError, client.RepositoryNotFoundError, client.RevisionNotFoundError) as error:
        problem = f'Hugging Face has no dataset {name} that you can access; check the name, or log in'
        raise DatasetNotFound(problem) from error
    except (ConnectionError, TimeoutError, FileNotFoundError, client.HTTPError) as error:
        if isinstance(error, errors.DataFilesNotFoundError | library().data_files.EmptyDatasetError):
            raise
        raise HubUnreachable(f'the dataset {name} cannot be read from Hugging Face: {error}') from error


def _described(path: str, meta: DatasetMeta, readers: Collection[str] | None) -> Source:
    """Return the subset and split of a folder or repository that a meta describes."""
    subset = None if meta.subset_name == DEFAULT_SUBSET else meta.subset_name
    name = dataset_name(Path(path)) if Path(path).is_absolute() else path.removeprefix(_HUB_PREFIX)
    source = _built(path, meta.split, name=subset, name_in_errors=name, **meta.options)
    if readers is not None and source.builder.name not in readers:
        known = ', '.join(sorted(readers))
        raise DatasetError(f'{source.name} has files of the kind {source.builder.name}, which is not one of {known}')
    splits: list[Any] = list(source.builder.config.data_files or source.builder.info.splits or ())
    if splits and meta.split not in splits:
        known = ', '.join(sorted(map(str, splits)))
        raise DatasetError(f'split {meta.split!r} does not exist in {source.name}; it has: {known}')
    return source


def _part(suffix: str, files: list[Path], options: Mapping[str, Any]) -> Source:
    if suffix == '.arrow':
        return _ArrowFiles(files)
    name = ', '.join(file.name for file in files[:3])
    filled = [file for file in files if file.stat().st_size]
    if not filled:
        return _Parts([])
    patterns = [glob.escape(str(file.absolute())) for file in filled]
    with _source_errors(name, UnreadableFile):
        if suffix in _MODULES:
            options = {**_CSV_OPTIONS, **options} if suffix == '.csv' else options
            return _built(_MODULES[suffix], _SPLIT, name_in_errors=name, data_files=patterns, **options)
        folder = str(filled[0].absolute().parent)
        return _built(folder, _SPLIT, name_in_errors=name, data_files=patterns, **options)


def _built(path: str, split: str, *, name_in_errors: str, **options: Any) -> '_Built':
    if Path(path).is_absolute():
        configs_of(Path(path))  # refuses files outside of the folder
    with _no_counts():
        builder = library().load_dataset_builder(path, **options)
        if 'data_files' not in options:
            _refuse_outside(builder, path, name_in_errors)
        if builder.name == 'json' and builder.config.features is None and split in (builder.config.data_files or ()):
            features = _json_features(builder, split)
            builder = library().load_dataset_builder(path, features=features, **options)
    return _Built(builder, split, name_in_errors)


def _refuse_outside(builder: Any, path: str, name: str) -> None:
    """Refuse files outside of a folder or repository.

    The patterns in its README were checked before; this also covers the names of the files that they match.

    Raises:
        DatasetError: a file is not inside.
    """
    folder = Path(path) if Path(path).is_absolute() else None
    for file in (str(file) for files in (builder.config.data_files or {}).values() for file in files):
        inside = Path(os.path.normpath(file)).is_relative_to(folder) if folder else file.startswith(f'{path}@')
        if not inside or '..' in Path(file).parts or '::' in file:
            # The name of the file could reveal the content of a folder of a service.
            raise DatasetError(f'{name} has a README that names a file outside of it')


@contextmanager
def _no_counts() -> Generator[None]:
    """Prevent a request to the internet by which the library counts the uses of its readers, also for local files."""
    config = library().config
    before, config.HF_UPDATE_DOWNLOAD_COUNTS = config.HF_UPDATE_DOWNLOAD_COUNTS, False
    try:
        yield
    finally:
        config.HF_UPDATE_DOWNLOAD_COUNTS = before


def _json_features(builder: Any, split: str) -> Any:
    """Return the features of JSON files in which objects are stored as JSON, and times as strings.

    The library infers features from the first 10 MB of the first file, and refuses other columns afterwards. The names
    of columns are therefore read from all JSON lines of this machine.
    """
    try:
        found = builder.as_streaming_dataset(split).features
    except StopIteration as error:
        # The library requires at least one file.
        raise DatasetError('the JSON files have no rows; an archive may contain no file') from error
    if not found:
        return found
    files = [Path(file) for file in builder.config.data_files[split] if '://' not in str(file)]
    is_found = len(files) == 1 and files[0].stat().st_size <= builder.config.chunksize
    later = () if is_found else _names_in(files)
    features = {name: _json_feature(feature) for name, feature in found.items()}
    return library().Features({**dict.fromkeys(later, library().Json()), **features})


def _names_in(files: Sequence[Path]) -> Iterable[str]:
    """Return the names of the columns of JSON lines; files in other forms are skipped."""
    names: dict[str, None] = {}
    for file in files:
        with file.open('rb') as lines, suppress(ValueError):
            for line in lines:
                row = json.loads(line) if line.strip() else {}
                if not isinstance(row, dict):
                    break
                names |= dict.fromkeys(cast('dict[str, Any]', row))
    return names


def _json_feature(feature: Any) -> Any:
    types = library()
    item = feature.feature if isinstance(feature, types.List) else feature
    if not isinstance(item, types.Value) or item.dtype == 'null':
        return types.Json()
    is_time = item.dtype.startswith(('timestamp', 'date', 'time'))
    return types.Value('string') if is_time and item is feature else feature


@dataclass(frozen=True)
class _Built:
    """Files that a builder of the library reads."""

    builder: Any
    split: str
    name: str
    """Name of the files, for errors."""

    def files(self) -> list[str]:
        return list(map(str, (self.builder.config.data_files or {}).get(self.split, ())))

    @property
    def cure(self) -> str:
        """Cure of errors that the rows may cause; empty if the files define the types of columns."""
        return _TYPES_CURE if self.builder.name in _INFERRED else ''

    def rows(self) -> Sequence[Row]:
        with _source_errors(self.name, UnreadableFile, self.cure):
            self.builder.download_and_prepare()
            return TableRows(as_stored(self.builder.as_dataset(self.split)))

    def stream(self) -> Iterator[Row]:
        with _source_errors(self.name, UnreadableFile, self.cure):
            yield from rows_of_stream(as_stored(self.builder.as_streaming_dataset(self.split)))


@dataclass(frozen=True)
class _ArrowFiles:
    """Arrow files, which are mapped into memory."""

    paths: list[Path]

    def files(self) -> list[str]:
        return list(map(str, self.paths))

    def rows(self) -> Sequence[Row]:
        return joined([TableRows(as_stored(_mapped(file))) for file in self.paths])

    def stream(self) -> Iterator[Row]:
        yield from self.rows()


def _mapped(file: Path) -> Any:
    import pyarrow as pa  # noqa: PLC0415 - imported only if needed

    with _source_errors(file.name, UnreadableFile):
        try:
            return library().Dataset.from_file(str(file))
        except pa.ArrowInvalid:  # not a stream, but perhaps a file with random access
            return library().Dataset(pa.ipc.open_file(pa.memory_map(str(file))).read_all())


@dataclass(frozen=True)
class _Parts:
    """Files of different formats, one after the other."""

    parts: Sequence[Source]

    def files(self) -> list[str]:
        return [file for part in self.parts for file in part.files()]

    def rows(self) -> Sequence[Row]:
        return list(chain.from_iterable(part.rows() for part in self.parts))

    def stream(self) -> Iterator[Row]:
        return chain.from_iterable(part.stream() for part in self.parts)


@contextmanager
def _source_errors(name: str, error_class: type[DatasetError], cure: str = '') -> Generator[None]:
    """Convert the library's errors about files; errors of the disk are raised unchanged."""
    try:
        yield
    except (DatasetError, HubError):
        raise
    except (library().exceptions.DatasetsError, ValueError, TypeError, LookupError, OSError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, library().exceptions.DatasetGenerationError) else None
        found = cause if isinstance(cause, Exception) else error
        if isinstance(found, OSError) and found.errno is not None:
            raise found from error
        raise error_class(f'{name} cannot be read: {found}{cure}') from error
