"""Attention within each sequence of a pack, as an attention function of transformers.

It is registered under its own name through transformers' `AttentionInterface`, and reads the
sequence spans from a keyword argument that the model hands through to every attention layer.
No mask function is registered under that name, so transformers builds no mask.

Legend: T rows of the pack, L rows of one sequence, S keys of one sequence (cached ones
included), Q query heads, K key-value heads, H head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from twinkle.nn.errors import UnsupportedModel
from twinkle.nn.spans import SequenceSpan

IMPLEMENTATION = 'twinkle_packed'
"""For `attn_implementation` of transformers."""
SEQUENCES_ARGUMENT = 'twinkle_sequences'
"""Keyword argument of the model that carries the spans."""
_UNSUPPORTED_ARGUMENTS = ('softcap', 's_aux', 'position_bias')


def packed_attention(
    module: torch.nn.Module,
    query_1QTH: Tensor,
    key_1KTH: Tensor,
    value_1KTH: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each sequence.

    Returns:
        float [1, T, Q, H], zero for rows in no sequence; and no attention weights.

    Raises:
        UnsupportedModel: the layer asks for soft-capped or sink attention, or brings a mask.
    """
    unsupported = [name for name in _UNSUPPORTED_ARGUMENTS if arguments.get(name) is not None]
    if unsupported or attention_mask is not None:
        raise UnsupportedModel(f'attention with {unsupported or "a mask"} is not supported')
    sequences: Sequence[SequenceSpan] = arguments[SEQUENCES_ARGUMENT]
    window: int | None = arguments.get('sliding_window')
    outputs: list[Tensor] = []
    for span in sequences:
        rows = slice(span.begin_row, span.end_row)
        keys, values = key_1KTH[0, :, rows], value_1KTH[0, :, rows]
        if span.cache is not None:
            keys, values = span.cache.append(module.layer_idx, keys, values)
        outputs.append(_attend(query_1QTH[0, :, rows], keys, values, scaling=scaling, window=window))
    padding_rows = query_1QTH.shape[2] - sequences[-1].end_row
    if padding_rows:
        outputs.append(torch.zeros_like(query_1QTH[0, :, -padding_rows:]))
    output_QTH = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
    return output_QTH.transpose(0, 1)[None], None


def _attend(
    query_QLH: Tensor, key_KSH: Tensor, value_KSH: Tensor, *, scaling: float | None, window: int | None
) -> Tensor:
    new, total = query_QLH.shape[1], key_KSH.shape[1]
    is_windowed = window is not None and total > window
    is_square = new == total and not is_windowed
    mask_LS = None
    if not is_square and (new > 1 or is_windowed):
        mask_LS = _causal_mask(new, total, window=window, device=query_QLH.device)
    return scaled_dot_product_attention(
        query_QLH[None],
        key_KSH[None],
        value_KSH[None],
        attn_mask=mask_LS,
        is_causal=is_square and new > 1,
        scale=scaling,
        enable_gqa=query_QLH.shape[0] != key_KSH.shape[0],
    )[0]


def _causal_mask(new: int, total: int, *, window: int | None, device: torch.device) -> Tensor:
    """Return bool [new, total]: the last `new` of `total` tokens see themselves and those before, within the window."""
    query_position = torch.arange(total - new, total, device=device)[:, None]
    key_position = torch.arange(total, device=device)[None, :]
    mask = key_position <= query_position
    if window is not None:
        mask &= key_position > query_position - window
    return mask


AttentionInterface.register(IMPLEMENTATION, packed_attention)
