"""Conversion of a prompt's media from its feature to the engine's format."""

import numpy as np
import numpy.typing as npt
import torch

from twinkle.data_format import InputFeature, MediaSpec
from twinkle.nn import MediaSpan
from twinkle.processor import MediaFields
from twinkle.sampler.engine import PromptMedia
from twinkle.sampler.errors import InvalidPrompt


def prompt_media(feature: InputFeature, spec: MediaSpec | None) -> PromptMedia | None:
    """Return the media of a prompt, or None for a text prompt.

    Args:
        feature: the prompt. Tokens with a label were sampled in earlier turns and are treated as text.
        spec: the model's media specification; None for a text-only model.

    Raises:
        InvalidPrompt: the model does not support the media, or tokens, grids, patches and positions are inconsistent.
    """
    ids = _integers(feature, 'input_ids')
    is_produced = np.zeros(len(ids), np.bool_)
    if spec is not None and feature.get('labels') is not None:
        labels = _integers(feature, 'labels')
        if len(labels) != len(ids):
            raise InvalidPrompt(f'labels must have {len(ids)} items, the length of input_ids, got {len(labels)}')
        is_produced[1:] = labels[:-1] == ids[1:]
    found = MediaFields(feature, spec, _refusal).read(ids, is_produced)
    if not found:
        return None
    spans = [
        MediaSpan(item.begin_row, item.end_row, item.kind, torch.from_numpy(item.patches_PC), item.grid)
        for item in found
    ]
    if not spec.has_axes:
        counted = np.broadcast_to(np.arange(len(ids)), (3, len(ids)))
        return PromptMedia(spans=tuple(spans), positions_3T=counted, has_axes=False)
    positions_3T = _integers(feature, 'position_ids', dim_count=2)
    if positions_3T.shape != (3, len(ids)) or positions_3T.min() < 0:
        raise InvalidPrompt(f'position_ids must contain integers >= 0 and have the shape [3, {len(ids)}]')
    return PromptMedia(spans=tuple(spans), positions_3T=positions_3T)


def _integers(feature: InputFeature, name: str, *, dim_count: int = 1) -> npt.NDArray[np.int64]:
    try:
        given = np.asarray(feature.get(name))
    except (ValueError, TypeError, RuntimeError):
        raise InvalidPrompt(f'{name} must be integers in rows of equal length') from None
    if given.ndim != dim_count or (given.size and given.dtype.kind not in 'iu'):
        raise InvalidPrompt(
            f'{name} must be a {dim_count}-dimensional integer array, got {given.dtype} {list(given.shape)}'
        )
    return given.astype(np.int64)


def _refusal(field: str, problem: str) -> InvalidPrompt:
    return InvalidPrompt(f'{field} {problem}')
