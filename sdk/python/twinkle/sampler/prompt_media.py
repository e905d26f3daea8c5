"""The images and videos of a prompt, from its feature to the engine."""

import numpy as np
import numpy.typing as npt
import torch

from twinkle.data_format import InputFeature, MediaSpec
from twinkle.nn import MediaSpan
from twinkle.processor import MediaFields
from twinkle.sampler.engine import PromptMedia
from twinkle.sampler.errors import InvalidPrompt


def prompt_media(feature: InputFeature, spec: MediaSpec | None) -> PromptMedia | None:
    """Return the media of a prompt, None for one of text.

    Args:
        feature: the prompt; what labels ask for in it is text that was sampled before.
        spec: how the model reads images; None for one that reads text alone.

    Raises:
        InvalidPrompt: the model reads no images, or tokens, grids, patches and positions do not fit together.
    """
    ids = _integers(feature, 'input_ids')
    is_produced = np.zeros(len(ids), np.bool_)
    if spec is not None and feature.get('labels') is not None:
        labels = _integers(feature, 'labels')
        if len(labels) != len(ids):
            raise InvalidPrompt(f'labels must be as many as input_ids, {len(ids)}, got {len(labels)}')
        is_produced[1:] = labels[:-1] == ids[1:]
    found = MediaFields(feature, spec, _refusal).read(ids, is_produced)
    if not found:
        return None
    spans = [
        MediaSpan(one.begin_row, one.end_row, one.kind, torch.from_numpy(one.patches_PC), one.grid) for one in found
    ]
    if not spec.has_axes:
        counted = np.broadcast_to(np.arange(len(ids)), (3, len(ids)))
        return PromptMedia(spans=tuple(spans), positions_3T=counted, has_axes=False)
    positions_3T = _integers(feature, 'position_ids', dim_count=2)
    if positions_3T.shape != (3, len(ids)) or positions_3T.min() < 0:
        raise InvalidPrompt(f'position_ids must be integers [3, {len(ids)}] of at least 0')
    return PromptMedia(spans=tuple(spans), positions_3T=positions_3T)


def _integers(feature: InputFeature, name: str, *, dim_count: int = 1) -> npt.NDArray[np.int64]:
    try:
        given = np.asarray(feature.get(name))
    except (ValueError, TypeError, RuntimeError):
        raise InvalidPrompt(f'{name} must be integers in rows that are equally long') from None
    if given.ndim != dim_count or (given.size and given.dtype.kind not in 'iu'):
        raise InvalidPrompt(f'{name} must be integers in {dim_count} dimensions, got {given.dtype} {list(given.shape)}')
    return given.astype(np.int64)


def _refusal(field: str, problem: str) -> InvalidPrompt:
    return InvalidPrompt(f'{field} {problem}')
