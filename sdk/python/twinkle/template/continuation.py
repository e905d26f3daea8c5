"""Append sampled tokens to a prompt without tokenizing anything again."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from twinkle.data_format import IGNORE_INDEX, STREAMS, InputFeature
from twinkle.template.errors import InvalidFeature
from twinkle.template.labels import IntVector, shift_labels


def token_fields(ids: IntVector) -> InputFeature:
    """Return the token fields that every feature has, int32 [T] each, and its `length`, for input ids [T]."""
    return InputFeature(
        input_ids=ids,
        attention_mask=np.ones(len(ids), dtype=np.int32),
        position_ids=np.arange(len(ids), dtype=np.int32),
        length=len(ids),
    )


def continued(prompt_feature: InputFeature, new_tokens: Sequence[int]) -> InputFeature:
    """Return `prompt_feature` followed by labelled `new_tokens`; see `Template.concat_input_feature`."""
    prompt = _token_ids(prompt_feature.get('input_ids', ()), 'prompt_feature.input_ids')
    new = _token_ids(new_tokens, 'new_tokens')
    old = _rows(prompt_feature, len(prompt))
    ids = np.concatenate([prompt, new])
    labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
    labels[: len(prompt)] = old.get('labels', IGNORE_INDEX)
    # Labels are shifted: the last token of the prompt predicts the first new token.
    first = max(len(prompt) - 1, 0)
    labels[first : first + len(new)] = new if len(prompt) else shift_labels(new)
    mask = np.ones(len(ids), dtype=np.int32)
    mask[: len(prompt)] = old.get('completion_mask', _labelled(old, len(prompt)))
    joined = InputFeature(**prompt_feature)
    joined.update(token_fields(ids))
    if np.ndim(prompt_feature.get('position_ids', ())) > 1:
        positions = np.asarray(prompt_feature.get('position_ids'))
        if positions.shape != (3, len(prompt)):
            problem = f'must be [3, {len(prompt)}], got {list(positions.shape)}'
            raise InvalidFeature('prompt_feature.position_ids', problem)
        joined['position_ids'] = extend_positions(positions, len(new))
    joined.update({'labels': labels, 'completion_mask': mask})
    for name in old.keys() & {*STREAMS, 'loss_weights'}:
        cast('dict[str, Any]', joined)[name] = _extended(old[name], len(new), filler=name == 'loss_weights')
    if 'loss_weights' in joined:
        np.asarray(joined['loss_weights'])[first : first + len(new)] = 1
    return joined


def extend_positions(positions: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Extend the positions of a prompt by `count` text tokens, which continue after the largest position.

    Args:
        positions: integers [3, T].
        count: number N of text tokens.

    Returns:
        Positions [3, T + N] of the same dtype.
    """
    first = int(positions.max()) + 1
    more = np.arange(first, first + count, dtype=positions.dtype)
    return np.concatenate([positions, np.broadcast_to(more, (3, count))], axis=1)


def _token_ids(given: Any, field: str) -> IntVector:
    ids = np.asarray(given)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in 'iu'):
        raise InvalidFeature(field, f'must be a list of token ids, got shape {ids.shape} of {ids.dtype}')
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise InvalidFeature(field, f'must be token ids in 0 to 2**31 - 1, got {int(ids.min())} to {int(ids.max())}')
    return ids.astype(np.int32)


def _rows(feature: InputFeature, count: int) -> dict[str, npt.NDArray[Any]]:
    """Return the prompt's per-token arrays, with one row per token."""
    fields = cast('Mapping[str, Any]', feature)
    names = [name for name in ('labels', 'completion_mask', 'loss_weights', *STREAMS) if fields.get(name) is not None]
    rows = {name: np.asarray(fields[name]) for name in names}
    for name, array in rows.items():
        if array.ndim < 1 or len(array) != count:
            problem = f'must have one row per token, {count} in total, got shape {list(array.shape)}'
            raise InvalidFeature(f'prompt_feature.{name}', problem)
    return rows


def _labelled(rows: Mapping[str, npt.NDArray[Any]], count: int) -> IntVector:
    """Return the completion mask implied by shifted labels: 1 for tokens that are the label of their predecessor."""
    mask = np.zeros(count, dtype=np.int32)
    if 'labels' in rows:
        mask[1:] = rows['labels'][:-1] != IGNORE_INDEX
    return mask


def _extended(array: npt.NDArray[Any], count: int, *, filler: float) -> npt.NDArray[Any]:
    return np.concatenate([array, np.full((count, *array.shape[1:]), filler, dtype=array.dtype)])
