"""Conversion of one feature to validated numpy arrays. Errors name the feature and its invalid fields."""

from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.data_format import IGNORE_INDEX, STREAMS, InputFeature, MediaSpec
from twinkle.processor.errors import InvalidFeatures
from twinkle.processor.media_fields import MediaFields
from twinkle.processor.needs import STREAM_NAMES, FeatureNeeds
from twinkle.processor.packed_batch import Floats, Ints, PackedMedia

_FIELDS = frozenset(InputFeature.__annotations__) | frozenset(STREAM_NAMES)
"""Fields that a feature may have with any loss."""


@dataclass(frozen=True)
class FeatureArrays:
    """A feature without its masked tokens. K tokens are kept, and C kept tokens have a label that counts."""

    length: int
    """Number of tokens of the feature, including masked tokens."""
    input_ids_K: Ints
    position_ids_K: Ints
    """[K], or [3, K] for time, height and width."""
    counting_C: Ints
    """Index of each counted label among the kept tokens."""
    offsets_C: Ints
    """Index of each counted label in the feature."""
    labels_C: Ints
    weights_C: Floats
    streams: Mapping[str, npt.NDArray[Any]]
    """Validated streams with all tokens: [length] or [length, columns]."""
    media: tuple[PackedMedia, ...] = ()
    """Images, videos and clips, with their rows among the kept tokens."""
    routed_experts_KLA: Ints | None = None
    """[K, layers, experts per token]: experts of each kept token, -1 where the router chooses; None if not given."""


@dataclass(frozen=True)
class FeatureReader:
    """Reader of one feature of a batch.

    Args:
        feature: feature to read.
        index: index in the batch, for error messages.
        vocab_size: exclusive limit of token ids and labels.
        max_tokens: maximum number of tokens of a sequence.
        needs: labels and streams to read.
        media: media specification of the model; None for a text model.
        routing: numbers of layers with experts, experts per token and experts per layer; None if experts cannot be
            given.
    """

    feature: InputFeature
    index: int
    vocab_size: int
    max_tokens: int
    needs: FeatureNeeds
    media: MediaSpec | None = None
    routing: tuple[int, int, int] | None = None

    def read(self) -> FeatureArrays:
        """Return the feature as arrays.

        Raises:
            InvalidFeatures: the feature is invalid; the error names the field.
        """
        unknown = sorted(set(self.feature) - _FIELDS - set(self.needs.streams) - self._sources)
        if unknown:
            raise self._error('', f'has unknown fields {unknown}, which would be ignored; remove them')
        input_ids = self._token_ids('input_ids')
        length = len(input_ids)
        mask = self._flags('attention_mask', length)
        kept = np.flatnonzero(mask)
        if not len(kept):
            raise self._error('attention_mask', 'masks every token')
        labels = self._labels(length, last=int(kept[-1]))
        weights = self._floats('loss_weights', length, np.ones(length, np.float32))
        positions = self._positions(mask, kept)
        counts = (labels != IGNORE_INDEX) & self._is_own_label(length)
        if not self.needs.are_weightless_kept:
            counts &= weights != 0
        counting = np.flatnonzero(counts[kept])
        offsets = kept[counting]
        return FeatureArrays(
            length=length,
            input_ids_K=input_ids[kept],
            position_ids_K=positions,
            counting_C=counting,
            offsets_C=offsets,
            labels_C=labels[offsets],
            weights_C=weights[offsets],
            streams={name: self._stream(name, length) for name in self.needs.streams if name in self.feature},
            media=self._media(input_ids, labels, kept),
            routed_experts_KLA=self._routed_experts(length)[kept] if 'routed_experts' in self.feature else None,
        )

    @property
    def _sources(self) -> set[str]:
        """Accepted media columns of dataset rows: empty columns, and columns whose arrays the feature contains."""
        sources = {'images': 'pixel_values', 'videos': 'pixel_values_videos', 'audios': 'input_features'}
        # A column of a dataset that mixes text and media is empty in rows without media.
        given: dict[str, Any] = {name: self.feature.get(name) for name in sources}
        empty = {name for name, one in given.items() if one is None or (isinstance(one, Sized) and not len(one))}
        return empty | {name for name in sources if sources[name] in self.feature}

    def _media(self, input_ids: Ints, labels: Ints, kept: Ints) -> tuple[PackedMedia, ...]:
        is_produced = np.append(False, labels[:-1] == input_ids[1:])
        return MediaFields(self.feature, self.media, self._error).read(input_ids[kept], is_produced[kept])

    def _routed_experts(self, length: int) -> Ints:
        """Return [T, L, A], with -1 in the last rows if experts are given for the first tokens only."""
        name = 'routed_experts'
        if self.routing is None:
            raise self._error(
                name,
                'cannot be used: the base model has no routers that can replay experts, or ulysses ranks divide the '
                'rows; remove it',
            )
        layers, choices, experts = self.routing
        values = self._as_integers(name, self._array(name, None))
        if values.shape[1:] != (layers, choices) or not 1 <= len(values) <= length:
            wanted = f'must have shape {[length, layers, choices]}, or fewer rows for the first tokens'
            raise self._error(name, f'{wanted}; got {list(values.shape)}')
        if values.min() < 0 or values.max() >= experts:
            wrong = int(values.min()) if values.min() < 0 else int(values.max())
            raise self._error(name, f'contains {wrong}; experts are 0 to {experts - 1}')
        ordered = np.sort(values, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise self._error(name, 'contains an expert twice for one token and layer')
        free = np.full((length - len(values), layers, choices), -1)
        return np.concatenate([values, free])

    def _labels(self, length: int, *, last: int) -> Ints:
        if not self.needs.is_pooled or length == 1 or np.shape(self.feature.get('labels')) != (1,):
            return self._token_ids('labels', length=length)
        labels = np.full(length, IGNORE_INDEX, np.int64)
        labels[last] = self._token_ids('labels', length=1)[0]
        return labels

    def _is_own_label(self, length: int) -> npt.NDArray[np.bool_]:
        """Return [length], true where the model produced the label; all true without `completion_mask`."""
        own = np.ones(length, np.bool_)
        # The label at a token is the next token, so the mask is shifted by one. The mask has no entry for the label at
        # the last token, so this label counts.
        own[:-1] = self._flags('completion_mask', length)[1:]
        return own

    def _token_ids(self, field: str, *, length: int | None = None) -> Ints:
        if field not in self.feature:
            raise self._error(field, 'is missing')
        values = self._integers(field, np.empty(0, np.int64), length=length)
        is_known = (values >= 0) & (values < self.vocab_size)
        if field == 'labels':
            values = np.where(values == self.needs.ignore_index, IGNORE_INDEX, values)
            is_known = is_known & (values >= 0) | (values == IGNORE_INDEX)
        if not len(values):
            raise self._error(field, 'is empty')
        if not is_known.all():
            at = int(np.flatnonzero(~is_known)[0])
            raise self._error(f'{field}[{at}]', f'is {values[at]}; token ids are 0 to {self.vocab_size - 1}')
        return values

    def _flags(self, field: str, length: int) -> npt.NDArray[np.bool_]:
        """Return bool [length], true where a field of zeros and ones is 1; all true if the field is unset."""
        if self.feature.get(field) is None:
            return np.ones(length, np.bool_)
        values = self._integers(field, np.empty(0, np.int64), length=length)
        flags = values == 1
        if not (flags | (values == 0)).all():
            raise self._error(field, 'must contain only 0 and 1')
        return flags

    def _integers(self, field: str, default: Ints, *, length: int | None = None) -> Ints:
        values = self._vector(field, default, len(default) if length is None and len(default) else length)
        return self._as_integers(field, values)

    def _as_integers(self, field: str, values: npt.NDArray[Any]) -> Ints:
        if values.dtype.kind not in 'iub':
            raise self._error(field, f'must contain integers, got {values.dtype}')
        return values.astype(np.int64, copy=False)

    def _floats(self, field: str, length: int, default: Floats | None = None) -> Floats:
        return self._as_floats(field, self._vector(field, default, length))

    def _as_floats(self, field: str, values: npt.NDArray[Any]) -> Floats:
        if values.dtype.kind not in 'iuf':
            raise self._error(field, f'must contain numbers, got {values.dtype}')
        with np.errstate(over='ignore'):
            values = values.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            at = tuple(int(axis) for axis in np.argwhere(~np.isfinite(values))[0])
            raise self._error(f'{field}[{", ".join(map(str, at))}]', f'must be finite, got {values[at]}')
        return values

    def _stream(self, name: str, length: int) -> npt.NDArray[Any]:
        """Return a stream as float32 or, for token ids, int64: [length] or [length, columns]."""
        spec = STREAMS.get(name)
        values = self._array(name, None)
        dimensions = (1, 2) if spec is None else (2 if spec.is_wide else 1,)
        if values.ndim not in dimensions or (values.ndim == 2 and not values.shape[1]):
            shape = f'[{length}, K]' if dimensions == (2,) else f'[{length}]'
            raise self._error(name, f'must have shape {shape}, got {list(values.shape)}')
        self._check_length(name, values, length)
        if name == 'teacher_logits' and values.shape[1] != self.vocab_size:
            raise self._error(name, f'must have {self.vocab_size} columns, one per token id, got {values.shape[1]}')
        if spec is None or spec.kind == 'float':
            return self._as_floats(name, values)
        ids = self._as_integers(name, values)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.vocab_size):
            wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise self._error(name, f'contains {wrong}; token ids are 0 to {self.vocab_size - 1}')
        return ids

    def _vector(self, field: str, default: npt.NDArray[Any] | None, length: int | None) -> npt.NDArray[Any]:
        values = self._array(field, default)
        if values.ndim != 1:
            raise self._error(field, f'must have one dimension, got shape {values.shape}')
        if length is not None:
            self._check_length(field, values, length)
        return values

    def _array(self, field: str, default: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
        given = self.feature.get(field)
        try:
            return np.asarray(default if given is None else given)
        except (ValueError, RuntimeError, TypeError):
            raise self._error(field, 'must be an array of numbers with rows of equal length') from None

    def _check_length(self, field: str, values: npt.NDArray[Any], length: int) -> None:
        if len(values) != length:
            raise self._error(field, f'must have {length} elements like input_ids, got {len(values)}')

    def _positions(self, mask: npt.NDArray[np.bool_], kept: Ints) -> Ints:
        """Return [K], or [3, K] if positions on three axes were given to a model that has these axes."""
        given = self._array('position_ids', np.cumsum(mask) - 1)
        if self.media is None or not self.media.has_axes or given.ndim != 2:
            positions = self._integers('position_ids', np.cumsum(mask) - 1)[kept]
            self._check_positions(positions)
            return positions
        if given.shape != (3, len(mask)):
            problem = f'must have shape [3, {len(mask)}] or [{len(mask)}], got {list(given.shape)}'
            raise self._error('position_ids', problem)
        positions = self._as_integers('position_ids', given)[:, kept]
        if positions.min() < 0 or max(positions.max(), len(kept) - 1) >= self.max_tokens:
            problem = f'must be from 0 to {self.max_tokens - 1}, for at most {self.max_tokens} tokens'
            raise self._error('position_ids', problem)
        return positions

    def _check_positions(self, positions: Ints) -> None:
        if positions[0] < 0:
            raise self._error('position_ids', 'must not be negative')
        is_restart = positions[1:] == 0
        if not (is_restart | (np.diff(positions) > 0)).all():
            raise self._error('position_ids', 'must increase within a sample and restart at 0 with the next sample')
        if positions.max() >= self.max_tokens:
            raise self._error('input_ids', f'is longer than the maximum of {self.max_tokens} tokens; truncate it')

    def _error(self, field: str, problem: str) -> InvalidFeatures:
        return InvalidFeatures(problem, index=self.index, field=field)
