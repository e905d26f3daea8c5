"""The images and videos of a prompt, from its feature to the engine."""

import numpy as np
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
    ids = np.asarray(feature['input_ids'], np.int64)
    labels = np.asarray(feature.get('labels', np.full(len(ids), -1)))
    is_produced = np.append(False, labels[:-1] == ids[1:])
    found = MediaFields(feature, spec, _refusal).read(ids, is_produced)
    if not found:
        return None
    spans = [
        MediaSpan(one.begin_row, one.end_row, one.kind, torch.from_numpy(one.patches_PC), one.grid) for one in found
    ]
    if not spec.has_axes:
        counted = np.broadcast_to(np.arange(len(ids)), (3, len(ids)))
        return PromptMedia(spans=tuple(spans), positions_3T=counted, has_axes=False)
    positions_3T = np.asarray(feature.get('position_ids'))
    if positions_3T.shape != (3, len(ids)) or positions_3T.dtype.kind not in 'iu' or positions_3T.min() < 0:
        raise InvalidPrompt(f'position_ids must be integers [3, {len(ids)}] of at least 0')
    return PromptMedia(spans=tuple(spans), positions_3T=positions_3T.astype(np.int64))


def _refusal(field: str, problem: str) -> InvalidPrompt:
    return InvalidPrompt(f'{field} {problem}')
