"""Images, videos and audio of a pack: a frozen tower computes the embeddings of their tokens.

The tower processes each image, video or audio clip alone, without gradients and without adapters, so its output
depends only on that item (docs/adr/0022-vision-tower.md).

Legend: T rows of the pack, P patches of one image or video or frames of one audio clip, C features of a patch or frame,
N tokens of one item, D hidden size.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from twinkle.data_format import AudioSpec, Grid, MediaKind, MediaSpec, VisionSpec, media_spec
from twinkle.nn.attention import IMPLEMENTATION
from twinkle.nn.errors import PackError, UnsupportedModel
from twinkle.nn.rows import pad_rows

_ATTENTION = {'': 'sdpa', 'text_config': IMPLEMENTATION, 'vision_config': 'sdpa', 'audio_config': 'sdpa'}
"""Attention function by part of the model: text runs packed, and a tower processes one image or clip per call."""
_POSITION_AXES = 3
"""Axes time, height and width (Qwen2-VL, arXiv:2409.12191, section 2.1)."""


@dataclass(frozen=True)
class MediaSpan:
    """Rows `[begin_row, end_row)` of the pack are consecutive tokens of one image, video or audio clip."""

    begin_row: int
    end_row: int
    kind: MediaKind
    patches_PC: Tensor
    """float32 [P, C], as produced by the model's processor."""
    grid: Grid
    first_token: int = 0
    """Index of the first row's token among the tokens of the image, video or clip."""


class Tower(Protocol):
    """Part of a model that encodes images, videos or audio."""

    spec: MediaSpec
    language_model: Any
    """Part of the model that runs packed sequences."""

    def tokens(self, patches_PC: Tensor, grid: Grid) -> Tensor:
        """Return [N, D] for one image, video or audio clip."""
        ...


class VisionTower:
    """Tower of Qwen2.5-VL for images and videos.

    Args:
        model: model with the tower; its weights are shared.
        spec: image specification from the model's configuration.
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
    """Tower of Qwen2-Audio for audio clips.

    Args:
        model: model with the tower; its weights are shared.
        spec: audio specification from the model's configuration.
    """

    def __init__(self, model: PreTrainedModel, spec: AudioSpec) -> None:
        self.spec = spec
        body: Any = model.base_model
        self._encoder, self._projector = body.audio_tower, body.multi_modal_projector
        self.language_model: Any = body.language_model

    def tokens(self, patches_PC: Tensor, grid: Grid) -> Tensor:
        """Return [N, D] for one clip; padding frames after its end are masked."""
        audible_count, frames, _ = grid
        is_audible = torch.arange(frames // 2, device=patches_PC.device) < (audible_count - 1) // 2 + 1
        mask = create_bidirectional_mask(
            config=self._encoder.config,
            inputs_embeds=patches_PC.new_zeros((1, frames // 2, 1)),
            attention_mask=is_audible.long()[None],
        )
        encoded = self._encoder(patches_PC.T[None], attention_mask=mask).last_hidden_state
        return self._projector(encoded)[0, : self.spec.token_count(grid)]


class MediaInputs:
    """Inputs of the text layers of a model with a tower: embeddings in place of token ids."""

    def __init__(self, tower: Tower) -> None:
        self.spec = tower.spec
        self.language_model = tower.language_model
        self._tower = tower

    @classmethod
    def of(cls, model: PreTrainedModel) -> 'MediaInputs | None':
        """Return the inputs of a model, or None if it reads only text."""
        spec = media_spec(model.config.to_dict())
        if spec is None:
            return None
        return cls(VisionTower(model, spec) if isinstance(spec, VisionSpec) else AudioTower(model, spec))

    def __call__(self, ids: Tensor, position_ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
        """Return the embeddings and positions of padded ids.

        Raises:
            PackError: a span does not fit, or the positions have more axes than the model supports.
        """
        if position_ids.dim() != 1 and not self.spec.has_axes:
            raise PackError('this model takes one position per token; got positions with several axes')
        positions = pad_rows(axes_of(position_ids).T, len(ids)).T[:, None]
        if not self.spec.has_axes:
            positions = positions[0]
        return {'inputs_embeds': self.embeddings(ids, media)[None], 'position_ids': positions}

    @torch.no_grad()
    def rows(self, span: MediaSpan) -> Tensor:
        """Return [N, D] for the rows of a span; the result does not depend on the rest of the pass."""
        weight = self.language_model.embed_tokens.weight
        # The results of kernels depend on the alignment of memory. A copy always has torch's default alignment, so the
        # result does not depend on the offset of the patches in the batch.
        patches_PC = span.patches_PC.to(device=weight.device, dtype=weight.dtype, copy=True)
        rows_ND = self._tower.tokens(patches_PC, span.grid)
        return rows_ND[span.first_token : span.first_token + span.end_row - span.begin_row]

    def embeddings(self, input_ids_T: Tensor, media: Sequence[MediaSpan]) -> Tensor:
        """Return [T, D], the embeddings of the tokens, with the tower's output in the rows of media.

        Raises:
            PackError: a span exceeds the rows, or the tokens of its image, video or clip.
        """
        embeddings_TD = self.language_model.embed_tokens(input_ids_T)
        for index, span in enumerate(media):
            count = self.spec.token_count(span.grid)
            is_within = 0 <= span.begin_row < span.end_row <= len(input_ids_T) and span.first_token >= 0
            if not is_within or span.first_token + span.end_row - span.begin_row > count:
                raise PackError(f'media[{index}] of {count} tokens does not fit {len(input_ids_T)} rows: {span}')
        if not media:
            return embeddings_TD
        rows = torch.cat([torch.arange(span.begin_row, span.end_row) for span in media]).to(embeddings_TD.device)
        return embeddings_TD.index_copy(0, rows, torch.cat([self.rows(span) for span in media]))


def axes_of(position_ids: Tensor) -> Tensor:
    """Return int64 [3, T] for positions [T] or [3, T]; a text token has the same position on every axis."""
    return position_ids.expand(_POSITION_AXES, -1) if position_ids.dim() == 1 else position_ids


def load_pretrained(
    path: str | os.PathLike[str], *, dtype: torch.dtype, divide: Callable[[PreTrainedModel], object] | None = None
) -> PreTrainedModel:
    """Load the model of a local folder with packed attention for its text layers.

    Args:
        path: local folder in the Hugging Face layout.
        dtype: dtype of the weights.
        divide: called with the model before it has weights, to divide its parameters among ranks as `DTensor`.
            Each rank then reads only its shards.

    Raises:
        UnsupportedModel: the model has no language model that predicts the next token, its attention cannot be
            replaced, or it is divided and the folder has different values for tied weights.
        OSError: the folder does not contain a model.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    loader = AutoModelForCausalLM if media_spec(config.to_dict()) is None else AutoModelForMultimodalLM
    attention = packed_attention_of(config)
    try:
        if divide is not None:
            loader = _divided_class(loader, config, divide)
        model = loader.from_pretrained(path, dtype=dtype, attn_implementation=attention, local_files_only=True)
    except UnsupportedModel:
        raise
    except (KeyError, ValueError) as error:
        name = (config.architectures or [type(config).__name__])[0]
        problem = f'{type(error).__name__}: {error}'.split('\n')[0]
        raise UnsupportedModel(
            f'{name} (model_type {config.model_type!r}) is not supported: loading it with packed attention failed with '
            f'{problem}'
        ) from error
    if divide is not None and _is_tied(config) and _head_of(model).weight is not _embedding_of(model).weight:
        raise UnsupportedModel(
            'the folder has different values for the embedding and the output head, but its configuration ties them; '
            'set tie_word_embeddings to false in config.json'
        )
    return model


def _divided_class(loader: Any, config: Any, divide: Callable[[PreTrainedModel], object]) -> type[PreTrainedModel]:
    """Return a class whose constructor also divides the parameters; transformers reads the weights afterwards."""
    with torch.device('meta'):
        plain: Any = type(loader.from_config(config))

    class Divided(plain):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if _is_tied(config):
                # Transformers ties weights after it has read them, but FSDP must divide them as one parameter.
                _head_of(self).weight = _embedding_of(self).weight
            divide(cast('PreTrainedModel', self))
            self.__class__ = plain

    Divided.__name__, Divided.__qualname__, Divided.__module__ = plain.__name__, plain.__qualname__, plain.__module__
    return Divided


def _is_tied(config: Any) -> bool:
    return bool(getattr(config.get_text_config(), 'tie_word_embeddings', False))


def _embedding_of(model: Any) -> Any:
    return model.get_input_embeddings()


def _head_of(model: Any) -> Any:
    return model.get_output_embeddings()


def packed_attention_of(config: Any) -> str | dict[str, str]:
    """Return the attention functions of a packed model, as transformers' `attn_implementation`."""
    if media_spec(config.to_dict()) is None:
        return IMPLEMENTATION
    return {name: kind for name, kind in _ATTENTION.items() if not name or hasattr(config, name)}
