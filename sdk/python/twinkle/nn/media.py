"""Images, videos and audio of a pack: a frozen tower turns them into rows that stand in for tokens' embeddings.

The tower runs once for each image by itself, without gradients and without adapters, so that what it gives depends on
that image alone (docs/adr/0022-vision-tower.md).

Legend: T rows of the pack, P patches of one image or frames of one clip, C numbers of each, N tokens, D hidden size.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from twinkle.data_format import AudioSpec, Grid, MediaKind, MediaSpec, VisionSpec, media_spec
from twinkle.nn.attention import IMPLEMENTATION
from twinkle.nn.errors import PackError
from twinkle.nn.rows import pad_rows

_ATTENTION = {'': 'sdpa', 'text_config': IMPLEMENTATION, 'vision_config': 'sdpa', 'audio_config': 'sdpa'}
"""Text runs in packs; a tower sees one image or clip at a time, whole."""
_POSITION_AXES = 3
"""Time, height and width: Qwen2-VL, arXiv:2409.12191, section 2.1."""


@dataclass(frozen=True)
class MediaSpan:
    """Rows `[begin_row, end_row)` of the pack are the tokens of one image, video or clip, or a piece of them."""

    begin_row: int
    end_row: int
    kind: MediaKind
    patches_PC: Tensor
    """float32 [P, C], as the model's own processor makes them."""
    grid: Grid
    first_token: int = 0
    """Which of the image's tokens the first row is, where the rows hold a piece of it."""


class Tower(Protocol):
    """The part of a model that reads what is not text."""

    spec: MediaSpec
    language_model: Any
    """The part of the model that runs in packs."""

    def tokens(self, patches_PC: Tensor, grid: Grid) -> Tensor:
        """Return [N, D] for one image, video or clip."""
        ...


class VisionTower:
    """Qwen2.5-VL's images and videos.

    Args:
        model: whose tower it is; its weights are shared.
        spec: how its configuration says that images are read.
    """

    def __init__(self, model: PreTrainedModel, spec: VisionSpec) -> None:
        self.spec = spec
        body: Any = model.base_model
        self._visual = body.visual
        self.language_model: Any = body.language_model

    def tokens(self, patches_PC: Tensor, grid: Grid) -> Tensor:
        """Return [N, D] for one image or video."""
        return self._visual(patches_PC, grid_thw=torch.tensor([grid], device=patches_PC.device)).pooler_output


class AudioTower:
    """Qwen2-Audio's clips.

    Args:
        model: whose tower it is; its weights are shared.
        spec: how its configuration says that audio is read.
    """

    def __init__(self, model: PreTrainedModel, spec: AudioSpec) -> None:
        self.spec = spec
        body: Any = model.base_model
        self._encoder, self._projector = body.audio_tower, body.multi_modal_projector
        self.language_model: Any = body.language_model

    def tokens(self, patches_PC: Tensor, grid: Grid) -> Tensor:
        """Return [N, D] for one clip; the silence behind it is not attended to."""
        heard, frames, _ = grid
        is_heard = torch.arange(frames // 2, device=patches_PC.device) < (heard - 1) // 2 + 1
        mask = create_bidirectional_mask(
            config=self._encoder.config,
            inputs_embeds=patches_PC.new_zeros((1, frames // 2, 1)),
            attention_mask=is_heard.long()[None],
        )
        encoded = self._encoder(patches_PC.T[None], attention_mask=mask).last_hidden_state
        return self._projector(encoded)[0, : self.spec.token_count(grid)]


class MediaInputs:
    """What the text layers of a model with a tower take in the place of token ids."""

    def __init__(self, tower: Tower) -> None:
        self.spec = tower.spec
        self.language_model = tower.language_model
        self._tower = tower

    @classmethod
    def of(cls, model: PreTrainedModel) -> 'MediaInputs | None':
        """Return those of a model, None where it reads text alone."""
        spec = media_spec(model.config.to_dict())
        if spec is None:
            return None
        return cls(VisionTower(model, spec) if isinstance(spec, VisionSpec) else AudioTower(model, spec))

    def __call__(self, ids: Tensor, position_ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
        """Return embeddings and positions for padded ids.

        Raises:
            PackError: a span does not fit, or positions have axes that the model does not have.
        """
        if position_ids.dim() != 1 and not self.spec.has_axes:
            raise PackError('the model has one position a token')
        positions = pad_rows(axes_of(position_ids).T, len(ids)).T[:, None]
        if not self.spec.has_axes:
            positions = positions[0]
        return {'inputs_embeds': self.embeddings(ids, media)[None], 'position_ids': positions}

    @torch.no_grad()
    def rows(self, span: MediaSpan) -> Tensor:
        """Return [N, D] for the rows of a span, the same bits whatever else is in the pass."""
        weight = self.language_model.embed_tokens.weight
        # A copy of its own lies where torch aligns it, wherever in a batch the patches came from.
        patches_PC = span.patches_PC.to(device=weight.device, dtype=weight.dtype, copy=True)
        rows_ND = self._tower.tokens(patches_PC, span.grid)
        return rows_ND[span.first_token : span.first_token + span.end_row - span.begin_row]

    def embeddings(self, input_ids_T: Tensor, media: Sequence[MediaSpan]) -> Tensor:
        """Return [T, D]: the embedding of each token, and what the tower gives in the rows of media.

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
    if media_spec(config.to_dict()) is not None:
        attention = {name: kind for name, kind in _ATTENTION.items() if not name or hasattr(config, name)}
        return AutoModelForMultimodalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention, local_files_only=True
        )
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True
    )
