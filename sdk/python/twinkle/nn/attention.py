"""Attention within each sequence of a pack, registered as an attention function of transformers.

Transformers' `AttentionInterface` selects the function by name. The model passes the same `PackedSequences` to every
attention layer in a keyword argument. No mask function is registered under the name, so transformers builds no mask.

Legend: T rows of the pack, N spans of one call, L rows of each span with padding, S keys of each span: keys of its
parents, cached and own keys, and padding; Q query heads, K key-value heads, H head size, D any size of a head.
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from twinkle.nn.errors import UnsupportedModel
from twinkle.nn.sequences import CallShape, KernelCall, PackedSequences, kernel_dtype

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
    """Attend causally within each sequence, including to the rows of a span's parents.

    Returns:
        Attention output, float [1, T, Q, H], zero for rows outside all sequences; and None for the weights.

    Raises:
        UnsupportedModel: the layer uses soft-capping, attention sinks or a position bias, or passes a mask.
    """
    unsupported = [name for name in _UNSUPPORTED_ARGUMENTS if arguments.get(name) is not None]
    if unsupported or attention_mask is not None:
        raise UnsupportedModel(f'attention with {unsupported or "a mask"} is not supported')
    sequences: PackedSequences = arguments[SEQUENCES_ARGUMENT]
    window = arguments.get('sliding_window')
    sizes = [*sequences.lengths, query_1QTH.shape[2] - sum(sequences.lengths)]
    # `split` adds one autograd node per tensor, and its backward pass is one concatenation. The backward pass of slices
    # would fill a tensor of the full size for every slice.
    queries, keys, values = query_1QTH.split(sizes, 2), key_1KTH.split(sizes, 2), value_1KTH.split(sizes, 2)
    # The head sizes of queries and values differ in multi-head latent attention.
    outputs = [query_1QTH.new_zeros(1, sizes[-1], query_1QTH.shape[1], value_1KTH.shape[-1])] * len(sizes)
    for index in sequences.cached:
        key_KSH, value_KSH = sequences.spans[index].cache.append(module.layer_idx, keys[index][0], values[index][0])
        cached = queries[index], key_KSH[None], value_KSH[None]
        outputs[index] = _attend_cached(*cached, sequences, scaling=scaling, window=window).transpose(1, 2)
    for call in sequences.calls:
        rows = _stacked_rows(queries, call, sequences), *_stacked_keys((keys, values), call, sequences)
        blocks = sequences.masked_blocks(call.shape, window=window, like=query_1QTH)
        attended = _attend(*rows, blocks, scaling=scaling)
        for index, output_1QLH in zip(call.span_indexes, attended.split(1), strict=True):
            length = sequences.lengths[index]
            is_padded = length < call.shape.row_count
            own = output_1QLH.narrow(2, call.shape.front, length) if is_padded else output_1QLH
            outputs[index] = own.transpose(1, 2)
    return torch.cat(outputs, dim=1), None


def _attend_cached(
    query_1QLH: Tensor,
    key_1KSH: Tensor,
    value_1KSH: Tensor,
    sequences: PackedSequences,
    *,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attend with the last tokens of a sequence to all keys of its cache."""
    length, total = query_1QLH.shape[2], key_1KSH.shape[2]
    if length == 1:
        # One row with all keys of its cache needs no mask and is not padded: a sampler runs such a call for each token.
        begin = 0 if window is None else max(0, total - window)
        return _attend(query_1QLH, key_1KSH[:, :, begin:], value_1KSH[:, :, begin:], (), scaling=scaling)
    shape = CallShape.of(total - length, length, sequences.row_multiple)
    front, missing = shape.front, shape.key_count - total
    blocks = sequences.masked_blocks(shape, window=window, like=query_1QLH)
    attended = _attend(
        pad(query_1QLH, (0, 0, front, shape.row_count - front - length)),
        pad(key_1KSH, (0, 0, 0, missing)),
        pad(value_1KSH, (0, 0, 0, missing)),
        blocks,
        scaling=scaling,
    )
    return attended.narrow(2, front, length)


def _stacked_rows(pieces: Sequence[Tensor], call: KernelCall, sequences: PackedSequences) -> Tensor:
    """Return [N, Q, L, H], the rows of the spans of a call between their padding."""
    rows: list[Tensor] = []
    for index in call.span_indexes:
        front = call.shape.front
        back = call.shape.row_count - front - sequences.lengths[index]
        rows.append(pad(pieces[index], (0, 0, front, back)) if front or back else pieces[index])
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _stacked_keys(tensors: Sequence[Sequence[Tensor]], call: KernelCall, sequences: PackedSequences) -> list[Tensor]:
    """Return keys and values, each [N, K, S, D]: of the parents of each span of a call, of the span, and padding."""
    stacked: list[Tensor] = []
    for pieces in tensors:
        groups: list[Tensor] = []
        for parents, indexes in groupby(call.span_indexes, key=sequences.parents.__getitem__):
            own: list[Tensor] = []
            for index in indexes:
                missing = call.shape.key_count - sequences.begins[index] - sequences.lengths[index]
                own.append(pad(pieces[index], (0, 0, 0, missing)) if missing else pieces[index])
            group = torch.cat(own) if len(own) > 1 else own[0]
            for index in reversed(parents):
                group = torch.cat([pieces[index].expand(len(own), -1, -1, -1), group], dim=2)
            groups.append(group)
        stacked.append(torch.cat(groups) if len(groups) > 1 else groups[0])
    return stacked


def _attend(
    query_NQLH: Tensor,
    key_NKSH: Tensor,
    value_NKSD: Tensor,
    blocks: Sequence[tuple[CallShape, Tensor]],
    *,
    scaling: float | None,
) -> Tensor:
    """Attend in blocks of rows with masks, or causally in one call if there are no blocks; return [N, Q, L, D]."""
    dtype = query_NQLH.dtype
    query_NQLH, key_NKSH, value_NKSD = (x.to(kernel_dtype(x)) for x in (query_NQLH, key_NKSH, value_NKSD))
    size, is_grouped = value_NKSD.shape[-1], query_NQLH.shape[1] != key_NKSH.shape[1]
    if size < query_NQLH.shape[-1]:
        # With equal head sizes, torch selects the kernel for which shapes are padded (`twinkle.nn.sequences`).
        value_NKSD = pad(value_NKSD, (0, query_NQLH.shape[-1] - size))
    kernel = partial(scaled_dot_product_attention, scale=scaling, enable_gqa=is_grouped)
    if blocks:
        outputs: list[Tensor] = []
        rows = query_NQLH.split([block.row_count for block, _ in blocks], dim=2)
        for own, (block, mask_LS) in zip(rows, blocks, strict=True):
            key, value = key_NKSH, value_NKSD
            if block.key_count < key.shape[2]:
                key, value = key[:, :, : block.key_count], value[:, :, : block.key_count]
            outputs.append(kernel(own, key, value, attn_mask=mask_LS))
        attended = torch.cat(outputs, dim=2)
    else:
        attended = kernel(query_NQLH, key_NKSH, value_NKSD, is_causal=query_NQLH.shape[2] > 1)
    return (attended if attended.shape[-1] == size else attended[..., :size]).to(dtype)


AttentionInterface.register(IMPLEMENTATION, packed_attention)
