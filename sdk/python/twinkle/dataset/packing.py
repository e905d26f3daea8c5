"""Short examples joined into packs of about one length, so that no padding is computed."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from twinkle.data_format import IGNORE_INDEX
from twinkle.dataset.bin_packing import pack_best_fit
from twinkle.dataset.dataset import Dataset
from twinkle.dataset.errors import NotReady
from twinkle.dataset.files import Row
from twinkle.dataset.meta import DatasetMeta
from twinkle.template import Template

_TOKEN_FIELDS = ('input_ids', 'attention_mask', 'position_ids', 'labels', 'loss_weights', 'completion_mask')


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
            packing_num_proc: at least 1. Packing is one quick pass, so it means nothing here.
        """
        super().__init__(dataset_meta, template=template)
        if packing_num_proc < 1:
            raise ValueError(f'packing_num_proc must be at least 1, got {packing_num_proc}')
        self.is_packed = False
        """Whether rows are packs."""

    def pack_dataset(self) -> None:
        """Join the encoded examples into packs of at most the template's `max_length` tokens.

        No example is cut, and every example is in exactly one pack.

        Raises:
            NotReady: the rows are not encoded, hold prompts without labels, or are packed already.
        """
        if not self.is_encoded:
            raise NotReady('the rows are not encoded; call encode() before pack_dataset()', needs='encode')
        if self.is_packed:
            raise NotReady('the rows are packed already')
        if any('labels' not in row for row in self):
            raise NotReady('these rows have no labels (add_generation_prompt=True); only training examples are packed')
        lengths = [len(row['input_ids']) for row in self]
        bins = pack_best_fit(lengths, capacity=self._template().max_length)
        self._set_rows([join_features([self[index] for index in indices]) for indices in bins])
        self.is_packed = True


def join_features(features: Sequence[Row]) -> Row:
    """Return one feature of all samples' tokens; columns that are not per token become lists of `samples`."""
    tokens = {name: [feature[name] for feature in features] for name in _TOKEN_FIELDS if name in features[0]}
    tokens['labels'] = [_closed(labels) for labels in tokens['labels']]
    pack: dict[str, Any] = {name: np.concatenate(values) for name, values in tokens.items()}
    pack['length'] = sum(len(feature['input_ids']) for feature in features)
    pack['samples'] = [{name: value for name, value in row.items() if name not in pack} for row in features]
    return pack


def _closed(labels: Any) -> Any:
    """Return labels whose last is ignored: what follows belongs to another sample."""
    closed = np.array(labels, dtype=np.int32)
    closed[-1:] = IGNORE_INDEX
    return closed
