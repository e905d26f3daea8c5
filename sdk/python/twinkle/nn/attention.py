"""Attention within each sequence of a pack, registered as an attention function of transformers.

Transformers' `AttentionInterface` selects the function by name. The model passes the same `PackedSequences` to every
attention layer in a keyword argument. No mask function is registered under the name, so transformers builds no mask.

Legend: T rows of the pack, N spans of one call, L rows of each span with padding, S keys of each span: those of its
parents, cached ones, its own, and padding; Q query heads, K key-value heads, H head size, D any size of a head.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from twinkle.nn.errors import UnsupportedModel
from twinkle.nn.sequences import CallShape, KernelCall, PackedSequences

IMPLEMENTATION = 'twinkle_packed'
"""Value of transformers' `attn_implementation` that selects this function."""
SEQUENCES_ARGUMENT = 'twinkle_sequences'
"""Keyword argument of the model with the `PackedSequences`."""
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
    """Attend causally within each sequence, also to the rows of a span's parents.

    Returns:
        Attention output, float [1, T, Q, H], zero for rows outside all sequences; and None for the weights.

    Raises:
        UnsupportedModel: the layer uses soft-capped or sink attention, or passes a mask.
    """
    unsupported = [name for name in _UNSUPPORTED_ARGUMENTS if arguments.get(name) is not None]
    if unsupported or attention_mask is not None:
        raise UnsupportedModel(f'attention with {unsupported or "a mask"} is not supported')
    sequences: PackedSequences = arguments[SEQUENCES_ARGUMENT]
    window = arguments.get('sliding_window')
    padding = query_1QTH.shape[2] - sum(sequences.lengths)
    # `split` adds one autograd node per tensor, and its backward pass is one concatenation. The backward pass of slices
    # would fill a tensor of the full size for every slice.
    queries, keys, values = (x.split([*sequences.lengths, padding], dim=2) for x in (query_1QTH, key_1KTH, value_1KTH))
    outputs: dict[int, Tensor] = {}
    for index in sequences.cached:
        cached = sequences.spans[index].cache.append(module.layer_idx, keys[index][0], values[index][0])
        attended = _attend_cached(queries[index], cached, index, sequences, scaling=scaling, window=window)
        outputs[index] = attended.transpose(1, 2)
    for call in sequences.calls:
        query_NQLH = _stacked_rows(queries, call, sequences)
        key_NKSH, value_NKSH = (_stacked_keys(pieces, call, sequences) for pieces in (keys, values))
        blocks = sequences.masked_blocks(call, window=window, like=query_NQLH)
        attended = _attend(query_NQLH, key_NKSH, value_NKSH, blocks, scaling=scaling)
        for index, output_1QLH in zip(call.span_indexes, attended.split(1), strict=True):
            outputs[index] = _own_rows(output_1QLH, call.shape.front, sequences.lengths[index]).transpose(1, 2)
    rows = [outputs[index] for index in range(len(outputs))]
    if padding:
        # The head sizes of queries and values differ in multi-head latent attention.
        rows.append(query_1QTH.new_zeros(1, padding, query_1QTH.shape[1], value_1KTH.shape[-1]))
    return torch.cat(rows, dim=1), None


def _attend_cached(
    query_1QLH: Tensor,
    cached: tuple[Tensor, Tensor],
    index: int,
    sequences: PackedSequences,
    *,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attend with the last tokens of a sequence to its cached keys and values, [K, S, H] each."""
    key_1KSH, value_1KSH = (x[None] for x in cached)
    length, total = query_1QLH.shape[2], key_1KSH.shape[2]
    if length == 1:
        # One row with all keys of its cache needs no mask and is not padded: a sampler runs such a call for each token.
        used = (x if window is None else x[:, :, -window:] for x in (key_1KSH, value_1KSH))
        return _kernel(query_1QLH, *used, mask_LS=None, is_causal=False, scale=scaling)
    call = sequences.call_of(index, begin=total - length)
    front, row_count = call.shape.front, call.shape.row_count
    rows = _padded(query_1QLH, before=front, after=row_count - front - length)
    keys = (_padded(x, after=call.shape.key_count - total) for x in (key_1KSH, value_1KSH))
    blocks = sequences.masked_blocks(call, window=window, like=query_1QLH)
    return _own_rows(_attend(rows, *keys, blocks, scaling=scaling), front, length)


def _stacked_rows(pieces: Sequence[Tensor], call: KernelCall, sequences: PackedSequences) -> Tensor:
    """Return [N, Q, L, H], the rows of the sequences of a call between their padding."""
    front, row_count = call.shape.front, call.shape.row_count
    return _stacked(
        [
            _padded(pieces[index], before=front, after=row_count - front - sequences.lengths[index])
            for index in call.span_indexes
        ]
    )


def _stacked_keys(pieces: Sequence[Tensor], call: KernelCall, sequences: PackedSequences) -> Tensor:
    """Return [N, K, S, H], the keys of each sequence of a call: those of its parents, its own, and padding."""
    groups: list[Tensor] = []
    for parents, group in groupby(call.span_indexes, key=sequences.parents.__getitem__):
        indexes = list(group)
        own_count = call.shape.key_count - sequences.begins[indexes[0]]
        own = _stacked([_padded(pieces[index], after=own_count - sequences.lengths[index]) for index in indexes])
        if parents:
            shared = [pieces[index].expand(len(indexes), -1, -1, -1) for index in parents]
            own = torch.cat([*shared, own], dim=2)
        groups.append(own)
    return _stacked(groups)


def _stacked(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]


def _padded(x_NHLD: Tensor, *, before: int = 0, after: int) -> Tensor:
    return pad(x_NHLD, (0, 0, before, after)) if before or after else x_NHLD


def _own_rows(x_1QLH: Tensor, front: int, length: int) -> Tensor:
    rest = x_1QLH.shape[2] - front - length
    return x_1QLH.split([front, length, rest], dim=2)[1] if front or rest else x_1QLH


def _attend(
    query_NQLH: Tensor,
    key_NKSH: Tensor,
    value_NKSH: Tensor,
    blocks: Sequence[tuple[CallShape, Tensor]],
    *,
    scaling: float | None,
) -> Tensor:
    """Attend in blocks of rows with masks, or causally in one call if there are no blocks."""
    row_count, key_count = query_NQLH.shape[2], key_NKSH.shape[2]
    if not blocks:
        return _kernel(query_NQLH, key_NKSH, value_NKSH, mask_LS=None, is_causal=row_count > 1, scale=scaling)
    outputs: list[Tensor] = []
    queries = query_NQLH.split([block.row_count for block, _ in blocks], dim=2)
    for rows, (block, mask_LS) in zip(queries, blocks, strict=True):
        used = [x if block.key_count == key_count else x[:, :, : block.key_count] for x in (key_NKSH, value_NKSH)]
        outputs.append(_kernel(rows, used[0], used[1], mask_LS=mask_LS, is_causal=False, scale=scaling))
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, *, mask_LS: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask_LS,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


AttentionInterface.register(IMPLEMENTATION, packed_attention)
