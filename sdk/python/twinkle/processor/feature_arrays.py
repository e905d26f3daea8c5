"""One feature as checked numpy arrays. Every refusal names the feature, the field and the cure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.data_format import IGNORE_INDEX, InputFeature
from twinkle.processor.errors import InvalidFeatures
from twinkle.processor.packed_batch import STREAM_NAMES, Floats, Ints


@dataclass(frozen=True)
class FeatureArrays:
    """A feature without its masked tokens. K tokens are kept."""

    length: int
    """Tokens as given."""
    kept_K: Ints
    """Index of each kept token among those given."""
    input_ids_K: Ints
    position_ids_K: Ints
    labels_K: Ints
    """`IGNORE_INDEX` where masked."""
    weights_K: Floats
    streams: Mapping[str, Floats]


@dataclass(frozen=True)
class FeatureReader:
    """Reads the feature at `index` of a batch.

    Args:
        feature: what to read.
        index: for messages.
        vocab_size: token ids and labels are below it.
        max_tokens: most tokens of one sequence.
        ignore_index: label that does not count, beside `IGNORE_INDEX`.
    """

    feature: InputFeature
    index: int
    vocab_size: int
    max_tokens: int
    ignore_index: int

    def read(self) -> FeatureArrays:
        """Return the arrays.

        Raises:
            InvalidFeatures: names the field and the cure.
        """
        unknown = sorted(set(self.feature) - set(InputFeature.__annotations__))
        if unknown:
            raise self._refusal('', f'has unknown fields {unknown}, which would have no effect; remove them')
        input_ids = self._token_ids('input_ids', required=True)
        length = len(input_ids)
        labels = self._token_ids('labels', length=length, required=True)
        mask = self._integers('attention_mask', np.ones(length, np.int64))
        if not np.isin(mask, (0, 1)).all():
            raise self._refusal('attention_mask', 'must hold 0 and 1 only')
        kept = np.flatnonzero(mask)
        if not len(kept):
            raise self._refusal('attention_mask', 'masks every token')
        weights = self._floats('loss_weights', length, np.ones(length, np.float32))
        streams = {name: self._floats(name, length)[kept] for name in STREAM_NAMES if name in self.feature}
        positions = self._integers('position_ids', np.cumsum(mask) - 1)[kept]
        self._check_positions(positions)
        return FeatureArrays(length, kept, input_ids[kept], positions, labels[kept], weights[kept], streams)

    def _token_ids(self, field: str, *, length: int | None = None, required: bool) -> Ints:
        if required and field not in self.feature:
            raise self._refusal(field, 'is missing')
        values = self._integers(field, np.empty(0, np.int64), length=length)
        is_known = (values >= 0) & (values < self.vocab_size)
        if field == 'labels':
            values = np.where(values == self.ignore_index, IGNORE_INDEX, values)
            is_known = is_known & (values >= 0) | (values == IGNORE_INDEX)
        if not len(values):
            raise self._refusal(field, 'is empty')
        if not is_known.all():
            at = int(np.flatnonzero(~is_known)[0])
            raise self._refusal(f'{field}[{at}]', f'is {values[at]}; token ids are 0 to {self.vocab_size - 1}')
        return values

    def _integers(self, field: str, default: Ints, *, length: int | None = None) -> Ints:
        values = self._vector(field, default, len(default) if length is None and len(default) else length)
        if values.dtype.kind not in 'iub':
            raise self._refusal(field, f'must hold integers, got {values.dtype}')
        return values.astype(np.int64)

    def _floats(self, field: str, length: int, default: Floats | None = None) -> Floats:
        values = self._vector(field, default, length)
        if values.dtype.kind not in 'iuf':
            raise self._refusal(field, f'must hold numbers, got {values.dtype}')
        with np.errstate(over='ignore'):
            values = values.astype(np.float32)
        if not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            raise self._refusal(f'{field}[{at}]', f'must be finite, got {values[at]}')
        return values

    def _vector(self, field: str, default: npt.NDArray[Any] | None, length: int | None) -> npt.NDArray[Any]:
        given = self.feature.get(field)
        try:
            values = np.asarray(default if given is None else given)
        except (ValueError, RuntimeError, TypeError):
            raise self._refusal(field, 'must be a one-dimensional array of numbers') from None
        if values.ndim != 1:
            raise self._refusal(field, f'must have one dimension, got shape {values.shape}')
        if length is not None and len(values) != length:
            raise self._refusal(field, f'must have as many elements as input_ids, {length}, got {len(values)}')
        return values

    def _check_positions(self, positions: Ints) -> None:
        if positions[0] < 0:
            raise self._refusal('position_ids', 'must not be negative')
        is_restart = positions[1:] == 0
        if not (is_restart | (np.diff(positions) > 0)).all():
            raise self._refusal('position_ids', 'must rise within a sample and restart at 0 with the next')
        if positions.max() >= self.max_tokens:
            raise self._refusal(
                'input_ids', f'is longer than the {self.max_tokens} tokens the model takes; truncate it'
            )

    def _refusal(self, field: str, problem: str) -> InvalidFeatures:
        return InvalidFeatures(problem, index=self.index, field=field)
