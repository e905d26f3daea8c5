"""Join short examples into packs of similar length, so that little computation is spent on padding."""

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

from twinkle.data_format import IGNORE_INDEX, STREAMS
from twinkle.dataset.bin_packing import pack_best_fit
from twinkle.dataset.dataset import Dataset
from twinkle.dataset.errors import InvalidExample, NotReady
from twinkle.dataset.hf import library
from twinkle.dataset.hints import library_options
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.row_bounds import Row
from twinkle.dataset.table_steps import ARRAY_COLUMNS
from twinkle.dataset.tables import TableRows
from twinkle.infra import remote_class
from twinkle.template import Template

_TOKEN_FIELDS = (
    'input_ids', 'attention_mask', 'position_ids', 'labels', 'loss_weights', 'completion_mask', *STREAMS
)  # fmt: skip
"""Fields with one value or one row of values per token."""
_MEDIA_FIELDS = (
    'pixel_values', 'pixel_values_videos', 'pixel_attention_mask', 'image_grid_thw', 'image_sizes', 'video_grid_thw',
    'second_per_grid_ts', 'input_features', 'feature_attention_mask', 'routed_experts',
)  # fmt: skip
"""Model inputs other than tokens, which packing does not support. All names except the last are those of
transformers."""


@remote_class()
class PackingDataset(Dataset):
    """A dataset whose rows, after `pack_dataset`, are packs of several examples.

    A pack is one feature. Its `position_ids` restart at 0 at the beginning of each sample, so the model does not attend
    from one sample to another. The last label of each sample is ignored.
    """

    def __init__(
        self,
        dataset_meta: DatasetMeta | None = None,
        *,
        packing_num_proc: int = 1,
        template: Template | None = None,
    ) -> None:
        """Load the rows.

        Args:
            dataset_meta: source of the first rows. Default: none; rows are then added with `add_dataset`.
            packing_num_proc: number of processes that join the rows, at least 1. Default: 1, which is this process.
            template: the same as `set_template` with an instance. Default: none.

        Raises:
            HubError: the dataset cannot be found or downloaded.
            DatasetError: a file, subset or split cannot be read.
            ValueError: `packing_num_proc` is less than 1.
        """
        super().__init__(dataset_meta, template=template)
        if packing_num_proc < 1:
            raise ValueError(f'packing_num_proc must be at least 1, got {packing_num_proc}')
        self._packing_num_proc = packing_num_proc
        self.is_packed = False
        """Whether the rows are packs."""

    def pack_dataset(self) -> None:
        """Join the encoded examples into packs of at most the template's `max_length` tokens.

        Examples are not cut, and every example is in exactly one pack.

        Raises:
            NotReady: the rows are not encoded, are prompts without labels, are already packed or are being recorded.
            InvalidExample: a row has no tokens, is longer than `max_length`, has model inputs other than tokens, has a
                per-token field of a different length, or lacks a per-token field that another row of its pack has.
        """
        if not self.is_encoded:
            raise NotReady('the rows are not encoded; call encode() before pack_dataset()', needs='encode')
        if self.is_packed:
            raise NotReady('the rows are already packed; call pack_dataset() only once')
        self._replace(None, self._packed)
        self.is_packed = True

    def _packed(self, rows: Sequence[Row]) -> Sequence[Row]:
        if any('labels' not in row for row in rows):
            raise NotReady('the rows have no labels (add_generation_prompt=True); only training examples can be packed')
        capacity = self._template().max_length
        lengths: list[int] = []
        for index, row in enumerate(rows):
            refuse_unpackable(row, index=index, capacity=capacity)
            lengths.append(len(row['input_ids']))
        bins = pack_best_fit(lengths, capacity=capacity)
        table = self._table(rows, {'num_proc': self._packing_num_proc})
        if table is not None:
            return packed_table(table, bins, process_count=self._packing_num_proc)
        return [join_features([rows[index] for index in indices]) for indices in bins]


def packed_table(rows: TableRows, bins: Sequence[Sequence[int]], *, process_count: int) -> Sequence[Row]:
    """Return the packs of a table's rows, which several processes may join; `bins` contains the rows of each pack."""
    order = TableRows(library().Dataset.from_dict({'bin': [list(indices) for indices in bins]}))
    options = library_options('pack_dataset', {'num_proc': process_count})
    packs = order.changed(_JoinBins(rows), {**options, 'new_fingerprint': order.fingerprint_after(rows.table)})
    return TableRows(packs.table, arrays=ARRAY_COLUMNS) if isinstance(packs, TableRows) else packs


class _JoinBins:
    """Joins the rows of each bin in a batch of bins."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __call__(self, bins: Sequence[Row], begin: int) -> list[Row]:
        del begin
        chosen: list[list[int]] = [row['bin'] for row in bins]
        return [join_features([self._rows[index] for index in indices]) for indices in chosen]


def refuse_unpackable(feature: Row, *, index: int, capacity: int) -> None:
    """Raise an error if row `index` cannot be joined with others without losing or shifting values.

    Args:
        feature: the encoded row.
        index: index of the row in its dataset, for the error.
        capacity: maximum number of tokens in a pack.

    Raises:
        InvalidExample: the row has no tokens or labels, more than `capacity` tokens, a per-token field of a different
            length, or model inputs for images, video, audio or expert routing.
    """
    for name in ('input_ids', 'labels'):
        if not len(feature.get(name, ())):
            raise InvalidExample(index, name, 'is missing or empty; only encoded training examples can be packed')
    for name in _MEDIA_FIELDS:
        if name in feature:
            raise InvalidExample(index, name, 'is not supported in packs, which contain only tokens; do not pack it')
    count = len(feature['input_ids'])
    if count > capacity:
        raise InvalidExample(index, 'input_ids', f'has {count} tokens, more than max_length {capacity}')
    for name in _TOKEN_FIELDS:
        if _has(feature, name) and len(feature[name]) != count:
            raise InvalidExample(index, name, f'has {len(feature[name])} values for {count} tokens')


def join_features(features: Sequence[Row]) -> Row:
    """Return one feature with the tokens of all samples, in order, in new arrays.

    Missing masks and loss weights are set to 1, and missing positions count from 0. Other per-token fields must be in
    all samples or in none. The remaining columns of each sample are in the list `samples`.

    Raises:
        InvalidExample: only some of the samples have a per-token field. `row_index` is an index into `features`.
    """
    pack: dict[str, Any] = {}
    for name in _TOKEN_FIELDS:
        # A pack always has positions, because they separate the samples.
        if name == 'position_ids' or any(_has(feature, name) for feature in features):
            values = [_tokens(feature, name, index) for index, feature in enumerate(features)]
            pack[name] = np.concatenate([_end_ignored(labels) for labels in values] if name == 'labels' else values)
    pack['length'] = sum(len(feature['input_ids']) for feature in features)
    pack['samples'] = [{name: value for name, value in row.items() if name not in pack} for row in features]
    return pack


def _has(feature: Row, name: str) -> bool:
    """Return whether a feature has per-token values; a number or a text of that name is a column of the caller."""
    return isinstance(feature.get(name), Sized) and not isinstance(feature[name], str)


def _tokens(feature: Row, name: str, index: int) -> Any:
    if _has(feature, name):
        return np.asarray(feature[name])
    count = len(feature['input_ids'])
    match name:
        case 'position_ids':
            return np.arange(count, dtype=np.int32)
        case 'attention_mask' | 'completion_mask':
            return np.ones(count, dtype=np.int32)
        case 'loss_weights':
            return np.ones(count, dtype=np.float32)
        case _:
            raise InvalidExample(index, name, 'is missing, but other samples of the same pack have it')


def _end_ignored(labels: Any) -> Any:
    """Return a copy of labels whose last label is ignored, because the next token belongs to another sample."""
    result = np.array(labels, dtype=np.int32)
    result[-1:] = IGNORE_INDEX
    return result
