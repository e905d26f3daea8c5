"""Attention within each sequence of a pack, registered as an attention function of transformers.

Transformers' `AttentionInterface` selects the function by name. The model passes the sequence spans to every attention
layer in a keyword argument. No mask function is registered under the name, so transformers builds no mask.

Legend: T rows of the pack, N sequences of one call, L rows of one sequence, S keys of one sequence (cached ones
included), Q query heads, K key-value heads, H head size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from twinkle.nn.errors import UnsupportedModel
from twinkle.nn.spans import SequenceSpan

IMPLEMENTATION = 'twinkle_packed'
"""Value of transformers' `attn_implementation` that selects this function."""
SEQUENCES_ARGUMENT = 'twinkle_sequences'
"""Keyword argument of the model with the sequence spans."""
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
        Attention output, float [1, T, Q, H], zero for rows outside all sequences; and None for the weights.

    Raises:
        UnsupportedModel: the layer uses soft-capped or sink attention, or passes a mask.
    """
    unsupported = [name for name in _UNSUPPORTED_ARGUMENTS if arguments.get(name) is not None]
    if unsupported or attention_mask is not None:
        raise UnsupportedModel(f'attention with {unsupported or "a mask"} is not supported')
    sequences: Sequence[SequenceSpan] = arguments[SEQUENCES_ARGUMENT]
    attend = partial(_attend, scaling=scaling, window=arguments.get('sliding_window'))
    lengths = [span.end_row - span.begin_row for span in sequences]
    padding = query_1QTH.shape[2] - sum(lengths)
    # `split` adds one autograd node per tensor, and its backward pass is one concatenation. The backward pass of slices
    # would fill a tensor of the full size for every slice.
    queries, keys, values = (x.split([*lengths, padding], dim=2) for x in (query_1QTH, key_1KTH, value_1KTH))
    outputs: list[Tensor] = [torch.empty(0)] * len(lengths)
    for group in _groups(sequences, lengths):
        if sequences[group[0]].cache is not None:
            (index,) = group
            cached = sequences[index].cache.append(module.layer_idx, keys[index][0], values[index][0])
            outputs[index] = attend(queries[index], *(x[None] for x in cached)).transpose(1, 2)
            continue
        attended = attend(*(_stacked(pieces, group) for pieces in (queries, keys, values)))
        for index, output_1QLH in zip(group, attended.split(1), strict=True):
            outputs[index] = output_1QLH.transpose(1, 2)
    if padding:
        # The head sizes of queries and values differ in multi-head latent attention.
        outputs.append(query_1QTH.new_zeros(1, padding, query_1QTH.shape[1], value_1KTH.shape[-1]))
    return torch.cat(outputs, dim=1), None


def _groups(sequences: Sequence[SequenceSpan], lengths: Sequence[int]) -> list[list[int]]:
    """Group sequences that can share a kernel call: those of equal length without a cache.

    Each sequence with a cache is a separate group. The kernel's results are bitwise independent of the number of
    sequences in a call.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, (span, length) in enumerate(zip(sequences, lengths, strict=True)):
        key = (length, -1) if span.cache is None else (length, index)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _stacked(pieces: Sequence[Tensor], group: Sequence[int]) -> Tensor:
    return torch.cat([pieces[index] for index in group]) if len(group) > 1 else pieces[group[0]]


def _attend(
    query_NQLH: Tensor, key_NKSH: Tensor, value_NKSH: Tensor, *, scaling: float | None, window: int | None
) -> Tensor:
    new, total = query_NQLH.shape[2], key_NKSH.shape[2]
    is_windowed = window is not None and total > window
    is_square = new == total and not is_windowed
    mask_LS = None
    if not is_square and (new > 1 or is_windowed):
        mask_LS = _causal_mask(new, total, window=window, device=query_NQLH.device)
    return scaled_dot_product_attention(
        query_NQLH,
        key_NKSH,
        value_NKSH,
        attn_mask=mask_LS,
        is_causal=is_square and new > 1,
        scale=scaling,
        enable_gqa=query_NQLH.shape[1] != key_NKSH.shape[1],
    )


def _causal_mask(new: int, total: int, *, window: int | None, device: torch.device) -> Tensor:
    """Return bool [new, total], true where one of the last `new` tokens attends to one of all `total` tokens."""
    query_position = torch.arange(total - new, total, device=device)[:, None]
    key_position = torch.arange(total, device=device)[None, :]
    mask = key_position <= query_position
    if window is not None:
        mask &= key_position > query_position - window
    return mask


AttentionInterface.register(IMPLEMENTATION, packed_attention)
