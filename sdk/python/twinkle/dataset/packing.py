"""Short examples joined into packs of about one length, so that no padding is computed."""

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

from twinkle.data_format import IGNORE_INDEX, STREAMS
from twinkle.dataset.bin_packing import pack_best_fit
from twinkle.dataset.dataset import Dataset
from twinkle.dataset.errors import InvalidExample, NotReady
from twinkle.dataset.files import Row
from twinkle.dataset.hints import tell_of_processes
from twinkle.dataset.meta import DatasetMeta
from twinkle.infra import remote_class
from twinkle.template import Template

_TOKEN_FIELDS = (
    'input_ids', 'attention_mask', 'position_ids', 'labels', 'loss_weights', 'completion_mask', *STREAMS
)  # fmt: skip
_MEDIA_FIELDS = (
    'pixel_values', 'pixel_values_videos', 'pixel_attention_mask', 'image_grid_thw', 'image_sizes', 'video_grid_thw',
    'second_per_grid_ts', 'input_features', 'feature_attention_mask', 'routed_experts',
)  # fmt: skip
"""What models read beside tokens, by the names of processors in transformers; joining them is not built yet."""


@remote_class()
class PackingDataset(Dataset):
    """A dataset whose rows, after `pack_dataset`, are packs.

    A pack is one feature; `position_ids` restart at 0 where a sample begins, which tells the
    model that samples do not see each other, and no label crosses from one to the next.
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
            packing_num_proc: at least 1. Packing is one quick pass, so more are told to have no effect.
        """
        super().__init__(dataset_meta, template=template)
        tell_of_processes('packing_num_proc', packing_num_proc)
        self.is_packed = False
        """Whether rows are packs."""

    def pack_dataset(self) -> None:
        """Join the encoded examples into packs of at most the template's `max_length` tokens.

        No example is cut, and every example is in exactly one pack.

        Raises:
            NotReady: the rows are not encoded, hold prompts without labels, or are packed already.
            InvalidExample: a row is longer than `max_length`, or its fields do not have one value a token.
        """
        if not self.is_encoded:
            raise NotReady('the rows are not encoded; call encode() before pack_dataset()', needs='encode')
        if self.is_packed:
            raise NotReady('the rows are packed already')
        self._replace(None, self._packed)
        self.is_packed = True

    def _packed(self, rows: Sequence[Row]) -> Sequence[Row]:
        if any('labels' not in row for row in rows):
            raise NotReady('these rows have no labels (add_generation_prompt=True); only training examples are packed')
        capacity = self._template().max_length
        for index, row in enumerate(rows):
            refuse_unpackable(row, index=index, capacity=capacity)
        bins = pack_best_fit([len(row['input_ids']) for row in rows], capacity=capacity)
        return [join_features([rows[index] for index in indices]) for indices in bins]


def refuse_unpackable(feature: Row, *, index: int, capacity: int) -> None:
    """Refuse row `index` if joining it to others would lose or shift something.

    Raises:
        InvalidExample: it has no tokens or labels, more tokens than a pack, a field of another length, or
            tensors of images, video, audio or routing.
    """
    for name in ('input_ids', 'labels'):
        if not len(feature.get(name, ())):
            raise InvalidExample(index, name, 'is missing or empty; only encoded training examples are packed')
    for name in _MEDIA_FIELDS:
        if name in feature:
            raise InvalidExample(
                index, name, 'would be lost in a pack, whose model sees tokens only; do not pack these'
            )
    count = len(feature['input_ids'])
    if count > capacity:
        raise InvalidExample(index, 'input_ids', f'has {count} tokens, more than max_length {capacity}')
    for name in _TOKEN_FIELDS:
        if _has(feature, name) and len(feature[name]) != count:
            raise InvalidExample(index, name, f'has {len(feature[name])} values for {count} tokens')


def join_features(features: Sequence[Row]) -> Row:
    """Return one feature of all samples' tokens; columns that are not per token become lists of `samples`.

    A sample without a mask, weights or positions counts whole. Other streams must be in all samples or in none.

    Raises:
        InvalidExample: some samples have a stream and others do not.
    """
    pack: dict[str, Any] = {}
    for name in _TOKEN_FIELDS:
        # Positions are what keeps samples apart, so a pack always has them.
        if name == 'position_ids' or any(_has(feature, name) for feature in features):
            values = [_tokens(feature, name, index) for index, feature in enumerate(features)]
            pack[name] = np.concatenate([_closed(labels) for labels in values] if name == 'labels' else values)
    pack['length'] = sum(len(feature['input_ids']) for feature in features)
    pack['samples'] = [{name: value for name, value in row.items() if name not in pack} for row in features]
    return pack


def _has(feature: Row, name: str) -> bool:
    """Whether a feature has a value a token; a plain number or text of that name is a column of the caller's."""
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


def _closed(labels: Any) -> Any:
    """Return labels whose last is ignored: what follows belongs to another sample."""
    closed = np.array(labels, dtype=np.int32)
    closed[-1:] = IGNORE_INDEX
    return closed
