"""Images and videos of a pack: a frozen tower turns their patches into rows that stand in for tokens' embeddings.

The tower runs once for each image by itself, without gradients and without adapters, so that what it gives depends on
that image alone (docs/adr/0022-vision-tower.md).

Legend: T rows of the pack, P patches of one image or video, C numbers of a patch, N its tokens, D hidden size.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from twinkle.data_format import VISION_MODEL_TYPES, Grid, MediaKind, MediaSpec
from twinkle.nn.attention import IMPLEMENTATION
from twinkle.nn.errors import PackError

_ATTENTION = {'': 'sdpa', 'text_config': IMPLEMENTATION, 'vision_config': 'sdpa'}
"""Text runs in packs; the tower sees one image at a time, whole."""
_POSITION_AXES = 3
"""Time, height and width: Qwen2-VL, arXiv:2409.12191, section 2.1."""


@dataclass(frozen=True)
class MediaSpan:
    """Rows `[begin_row, end_row)` of the pack are the tokens of one image or video, or a piece of them."""

    begin_row: int
    end_row: int
    kind: MediaKind
    patches_PC: Tensor
    """float32 [P, C], as the model's image processor makes them."""
    grid: Grid
    first_token: int = 0
    """Which of the image's tokens the first row is, where the rows hold a piece of it."""


class VisionTower:
    """The part of a vision-language model that reads pixels.

    Args:
        model: whose tower it is; its weights are shared.
        spec: how its configuration says that images are read.
    """

    def __init__(self, model: PreTrainedModel, spec: MediaSpec) -> None:
        self.spec = spec
        body: Any = model.base_model
        self._visual = body.visual
        self.language_model: Any = body.language_model
        """The part of the model that runs in packs."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> 'VisionTower | None':
        """Return the tower of a model, None where it reads text alone."""
        spec = MediaSpec.of_config(model.config.to_dict())
        return None if spec is None else cls(model, spec)

    @torch.no_grad()
    def rows(self, span: MediaSpan) -> Tensor:
        """Return [N, D] for the rows of a span, the same bits whatever else is in the pass."""
        weight = self._visual.patch_embed.proj.weight
        # A copy of its own lies where torch aligns it, wherever in a batch the patches came from.
        patches_PC = span.patches_PC.to(device=weight.device, dtype=weight.dtype, copy=True)
        grid = torch.tensor([span.grid], device=weight.device)
        rows_ND = self._visual(patches_PC, grid_thw=grid).pooler_output
        return rows_ND[span.first_token : span.first_token + span.end_row - span.begin_row]

    def embeddings(self, input_ids_T: Tensor, media: Sequence[MediaSpan]) -> Tensor:
        """Return [T, D]: the embedding of each token, and what the tower gives in the rows of images and videos.

        Raises:
            PackError: a span reaches beyond the rows, or beyond its image.
        """
        embeddings_TD = self.language_model.embed_tokens(input_ids_T)
        for index, span in enumerate(media):
            count = self.spec.token_count(span.grid)
            is_within = 0 <= span.begin_row < span.end_row <= len(input_ids_T) and span.first_token >= 0
            if not is_within or span.first_token + span.end_row - span.begin_row > count:
                raise PackError(f'media[{index}] has {count} tokens, and {len(input_ids_T)} rows to be in, got {span}')
        if not media:
            return embeddings_TD
        rows = torch.cat([torch.arange(span.begin_row, span.end_row) for span in media]).to(embeddings_TD.device)
        return embeddings_TD.index_copy(0, rows, torch.cat([self.rows(span) for span in media]))


def axes_of(position_ids: Tensor) -> Tensor:
    """Return int64 [3, T] for positions [T] or [3, T]: text stands at the same place on every axis."""
    return position_ids.expand(_POSITION_AXES, -1) if position_ids.dim() == 1 else position_ids


def load_pretrained(path: str | os.PathLike[str], *, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of a local folder, its text to be run in packs.

    Raises:
        OSError: the folder is no model.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    if config.model_type in VISION_MODEL_TYPES:
        return AutoModelForImageTextToText.from_pretrained(
            path, dtype=dtype, attn_implementation=_ATTENTION, local_files_only=True
        )
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True
    )
