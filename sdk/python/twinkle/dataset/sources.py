"""Load the rows that a `DatasetMeta` describes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, cast

from twinkle.dataset.errors import DatasetError
from twinkle.dataset.files import format_of
from twinkle.dataset.hf import as_stored, is_stream, is_table, rows_of_stream, selected_columns, split_of
from twinkle.dataset.layout import NoDataFiles, files_of, has_configs
from twinkle.dataset.loading import Source, source_of_files, source_of_folder, source_of_hub
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.row_bounds import Row
from twinkle.dataset.tables import TableRows
from twinkle.hub import HubId, find_dataset, local_path, resolve_dataset
from twinkle.infra import get_logger


def load_rows(meta: DatasetMeta, *, is_local_allowed: bool = True) -> Sequence[Row]:
    """Return the rows of a dataset, restricted to the meta's `data_slice`.

    Args:
        meta: source of the rows.
        is_local_allowed: whether `dataset_id` may be a path; a service with untrusted callers sets False. Default:
            True.

    Raises:
        HubError: the dataset cannot be found or downloaded.
        DatasetError: the dataset does not have the subset or split, or a file cannot be read.
    """
    rows = _rows_given(meta) if meta.data is not None else open_source(meta, is_local_allowed=is_local_allowed).rows()
    return _sliced(rows, meta)


def open_source(
    meta: DatasetMeta,
    *,
    is_local_allowed: bool = True,
    is_private_allowed: bool = True,
    is_move_allowed: bool = True,
    is_streamed: bool = False,
    readers: Collection[str] | None = None,
) -> Source:
    """Return the files of a dataset on a hub or on this machine, without reading them.

    Args:
        meta: source of the rows, without `data`.
        is_local_allowed: see `load_rows`.
        is_private_allowed: whether the dataset may be private: hubs are asked with the token of this machine, and the
            caches of their clients are searched. Default: True.
        is_move_allowed: see `twinkle.hub.resolve_dataset`. Default: True.
        is_streamed: whether files on Hugging Face that are not on this machine are read over the network, in pieces,
            instead of being downloaded. Default: False.
        readers: modules of the library `datasets` that may read folders and repositories. Default: all.

    Raises:
        HubError: the dataset cannot be found or downloaded.
        DatasetError: the dataset does not have the subset or split, or there is no such file.
    """
    _refuse_missing_file(meta, is_local_allowed=is_local_allowed)
    dataset_id = meta.dataset_id or ''
    path = find_dataset(dataset_id, is_local_allowed=is_local_allowed, is_private_allowed=is_private_allowed)
    is_other_revision = 'revision' in meta.options and local_path(dataset_id) is None
    if is_other_revision or (path is None and (is_streamed or meta.options)):
        hub_id = HubId.parse(dataset_id)
        if hub_id.source != 'ms':
            access = {'is_private_allowed': is_private_allowed, 'is_move_allowed': is_move_allowed}
            return source_of_hub(hub_id.name, meta, readers, **access)
    if path is None:
        path = resolve_dataset(
            dataset_id,
            is_local_allowed=is_local_allowed,
            is_private_allowed=is_private_allowed,
            is_move_allowed=is_move_allowed,
        )
    if path.is_file():
        return source_of_files([path], **meta.options)
    if meta.options:
        return source_of_folder(path, meta, readers)
    try:
        files = files_of(path, subset_name=meta.subset_name, split=meta.split)
    except NoDataFiles:
        return source_of_folder(path, meta, readers)
    return source_of_folder(path, meta, readers) if has_configs(path) else source_of_files(files)


def stream_rows(meta: DatasetMeta, source: Source | None = None) -> Iterator[Row]:
    """Yield the rows of a dataset, restricted to the meta's `data_slice`, reading files in pieces.

    Args:
        meta: source of the rows.
        source: the result of `open_source`, unless the meta contains the rows. Reuse it in later iterations to read the
            same revision of the dataset.

    Raises:
        DatasetError: a file cannot be read; raised during iteration.
    """
    yield from _chosen(_given_one_by_one(meta) if source is None else source.stream(), meta)


def refuse_backwards(meta: DatasetMeta) -> None:
    """Raise an error if `data_slice` cannot be applied while the rows are read once, in order.

    Raises:
        DatasetError: the slice counts from the end or is not ascending.
    """
    selection = meta.data_slice
    if isinstance(selection, slice):
        parts = [part for part in (selection.start, selection.stop, selection.step) if part is not None]
        is_forward = all(part >= 0 for part in parts) and selection.step != 0
    else:
        is_forward = selection is None or all(index < after for index, after in pairwise([-1, *selection]))
    if not is_forward:
        raise DatasetError(
            f'data_slice must contain non-negative row indices in ascending order, got {selection}; '
            'for any other order, load the rows with Dataset'
        )


def find_files(
    meta: DatasetMeta,
    *,
    is_local_allowed: bool = True,
    is_private_allowed: bool = True,
    is_move_allowed: bool = True,
    download_limit_bytes: int | None = None,
) -> list[Path]:
    """Return the files of a dataset's subset and split, in order, for services that read them within limits.

    Args:
        meta: source of the rows, without `data`.
        is_local_allowed: whether `dataset_id` may be a path; a service with untrusted callers sets False. Default:
            True.
        is_private_allowed: see `open_source`.
        is_move_allowed: see `twinkle.hub.resolve_dataset`. Default: True.
        download_limit_bytes: maximum total size of the files of a downloaded repository. Default: no limit.

    Raises:
        HubError: the dataset cannot be found or downloaded.
        DatasetError: the dataset does not have the subset or split, or the id is the name of a file that does not
            exist.
    """
    _refuse_missing_file(meta, is_local_allowed=is_local_allowed)
    path = resolve_dataset(
        meta.dataset_id or '',
        is_local_allowed=is_local_allowed,
        is_private_allowed=is_private_allowed,
        is_move_allowed=is_move_allowed,
        download_limit_bytes=download_limit_bytes,
    )
    return [path] if path.is_file() else files_of(path, subset_name=meta.subset_name, split=meta.split)


def _refuse_missing_file(meta: DatasetMeta, *, is_local_allowed: bool) -> None:
    given = Path(meta.dataset_id or '')
    if is_local_allowed and '://' not in str(meta.dataset_id) and format_of(given) and not given.exists():
        raise DatasetError(f'there is no file {str(given)!r} in {Path.cwd()}; a hub dataset is named org/name')


def refuse_iterator(meta: DatasetMeta) -> None:
    """Raise an error if the rows can be read only once, because a stream reads them in every iteration.

    Raises:
        DatasetError: `data` is an iterator.
    """
    if isinstance(meta.data, Iterator):
        raise DatasetError('data is an iterator, which can be read only once; give a list')


def _given_one_by_one(meta: DatasetMeta) -> Iterator[Row]:
    data: Any = split_of(meta.data, meta.split)
    if is_stream(data):
        return rows_of_stream(data)
    if is_table(data) or isinstance(data, Mapping):
        return iter(_rows_given(meta))
    return (dict(row) for row in data)


def _chosen(stream: Iterator[Row], meta: DatasetMeta) -> Iterator[Row]:
    selection = meta.data_slice
    if selection is None:
        return stream
    if isinstance(selection, slice):
        return islice(stream, selection.start, selection.stop, selection.step)
    return _rows_at(stream, meta, selection)


def _rows_at(stream: Iterator[Row], meta: DatasetMeta, selection: Sequence[int]) -> Iterator[Row]:
    row_index = -1
    for index in selection:
        row = next(islice(stream, index - row_index - 1, None), None)
        if row is None:
            get_logger().warning('%s has no row %d, which data_slice requested', meta.name, index)
            return
        row_index = index
        yield row


def _rows_given(meta: DatasetMeta) -> Sequence[Row]:
    data: Any = split_of(meta.data, meta.split)
    if is_table(data):
        return TableRows(as_stored(selected_columns(data)))
    if is_stream(data):
        return list(rows_of_stream(data))
    if isinstance(data, Mapping):
        return _rows_of_columns(cast('Mapping[str, Sequence[Any]]', data))
    return [dict(row) for row in data]


def _rows_of_columns(data: Mapping[str, Sequence[Any]]) -> list[Row]:
    lengths = {name: len(values) for name, values in data.items()}
    if len(set(lengths.values())) > 1:
        raise DatasetError(f'data has columns of different lengths: {lengths}; give one value per row in each')
    return [dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)]


def _sliced(rows: Sequence[Row], meta: DatasetMeta) -> Sequence[Row]:
    if meta.data_slice is None:
        return rows
    if isinstance(meta.data_slice, slice):
        return _selected(rows, meta.data_slice)
    selection = [index for index in meta.data_slice if -len(rows) <= index < len(rows)]
    if len(selection) < len(meta.data_slice):
        get_logger().warning(
            '%s has %d rows; data_slice requested %d rows, %d of them exist',
            meta.name, len(rows), len(meta.data_slice), len(selection),
        )  # fmt: skip
    return _selected(rows, [index % len(rows) for index in selection])


def _selected(rows: Sequence[Row], selection: slice | Sequence[int]) -> Sequence[Row]:
    if isinstance(rows, TableRows):
        return rows.select(selection)
    return rows[selection] if isinstance(selection, slice) else [rows[index] for index in selection]
