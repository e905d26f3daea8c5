"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv 2309.14509): ranks divide the rows of each pass.

Each rank runs the layers on its own rows (`twinkle.nn.row_layout`). Before attention, the ranks exchange rows for
heads, so that each rank has all rows of some heads. After attention, the ranks reverse the exchange. The output head
and the losses run on all rows on every rank.

Legend: U ranks, T rows of the pass, N rows of each rank with padding, Q query heads, K key-value heads, H head size, D
hidden size.
"""

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from transformers import AttentionInterface, AutoConfig, PreTrainedConfig

from twinkle.data_format import media_spec
from twinkle.nn import BaseSharding, PackedCausalLM, PackError, RowLayout, UnsupportedModel
from twinkle.nn.attention import SEQUENCES_ARGUMENT, packed_attention
from twinkle.nn.sequences import PackedSequences
from twinkle.parallel.collectives import agreed_errors
from twinkle.parallel.rows import gathered_rows

IMPLEMENTATION = 'twinkle_ulysses'
"""Value of transformers' `attn_implementation` that selects `ulysses_attention`."""


def check_divisible(folder: str | os.PathLike[str], size: int) -> None:
    """Check from the configuration of a model that `size` ranks can divide the rows of its passes.

    Raises:
        UnsupportedModel: the model has a vision or audio tower, recurrent layers, or a number of heads that `size` does
            not divide.
        OSError: the folder does not contain a model.
    """
    config: PreTrainedConfig = cast('Any', AutoConfig).from_pretrained(folder, local_files_only=True)
    _check_text(config.get_text_config(), size, has_media=media_spec(config.to_dict()) is not None)


def divide_rows(model: PackedCausalLM, group: dist.ProcessGroup) -> None:
    """Divide the rows of each pass among the ranks of a group. Every rank must call it, after the model is loaded.

    Args:
        model: model to change in place.
        group: ranks that have the same weights, or shards of them, and run the same passes.

    Raises:
        UnsupportedModel: see `check_divisible`; the model was not changed.
    """
    _check_text(model.config, group.size(), has_media=model.media is not None)
    ranks = UlyssesRanks(group, model.device)
    cast('Any', model.backbone).set_attn_implementation(IMPLEMENTATION)
    model.row_ranks, model.routing = ranks, None
    model.sharding = UlyssesSharding(ranks, head_path=model.head_path, weights=model.sharding)


class UlyssesRanks:
    """Implements `twinkle.nn.RowRanks`.

    Args:
        group: the ranks.
        device: device of the model.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.anchor = torch.zeros(1, device=device, requires_grad=True)
        """Input of every exchange. Through it, the backward pass runs the same exchanges on all ranks, even on ranks
        whose rows have no adapter."""

    def for_attention(self, layout: RowLayout, sequences: PackedSequences) -> 'DividedPack':
        """Return the pack that `ulysses_attention` receives.

        Raises:
            PackError: a sequence has a cache.
        """
        if sequences.cached:
            raise PackError('sequences with a cache cannot run while ulysses ranks divide the rows')
        return DividedPack(self, layout, sequences)

    def all_rows(self, own_ND: Tensor, layout: RowLayout) -> Tensor:
        """Return [T, D], the rows of all ranks in the order of the pass. Every rank must call it."""
        return gathered_rows(own_ND, self.group, is_gradient_partial=False).index_select(0, layout.order_T)

    def exchange(self, parts_UNQH: Tensor) -> Tensor:
        """Send part i to rank i, and return the parts that this rank receives, in the order of the ranks."""
        received = torch.empty_like(parts_UNQH, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts_UNQH.contiguous(), group=self.group)
        return received


@dataclass(frozen=True)
class DividedPack:
    """Rows of a pass, in the layouts between the layers and in attention."""

    ranks: UlyssesRanks
    layout: RowLayout
    sequences: PackedSequences

    def heads_of(self, own_NQH: Tensor) -> Tensor:
        """Return [T, Q / U, H], all rows of this rank's heads."""
        parts_UNQH = own_NQH.reshape(len(own_NQH), self.ranks.size, -1, own_NQH.shape[-1]).transpose(0, 1)
        return self.ranks.exchange(parts_UNQH).flatten(0, 1).index_select(0, self.layout.order_T)

    def rows_of(self, heads_TQH: Tensor) -> Tensor:
        """Return [N, U Q, H], all heads of this rank's rows; the inverse of `heads_of`, with zeros in the padding."""
        size, count = self.ranks.size, self.layout.row_count
        places = heads_TQH.new_zeros(size * count, *heads_TQH.shape[1:])
        places.index_copy_(0, self.layout.order_T, heads_TQH)
        return self.ranks.exchange(places.view(size, count, *heads_TQH.shape[1:])).transpose(0, 1).flatten(1, 2)


class _Heads(Function):
    """`DividedPack.heads_of`. The exchanges are permutations, so their gradients are the inverse exchanges."""

    @staticmethod
    def forward(ctx: Any, own_NQH: Tensor, anchor: Tensor, pack: DividedPack) -> Tensor:
        del anchor
        ctx.pack = pack
        return pack.heads_of(own_NQH)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return ctx.pack.rows_of(*grad_outputs), None, None


class _Rows(Function):
    """`DividedPack.rows_of`."""

    @staticmethod
    def forward(ctx: Any, heads_TQH: Tensor, anchor: Tensor, pack: DividedPack) -> Tensor:
        del anchor
        ctx.pack = pack
        return pack.rows_of(heads_TQH)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return ctx.pack.heads_of(*grad_outputs), None, None


def ulysses_attention(
    module: torch.nn.Module,
    query_1QNH: Tensor,
    key_1KNH: Tensor,
    value_1KNH: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attend with all rows of this rank's heads; `twinkle.nn.attention` has the rest of the contract.

    Returns:
        Attention output, float [1, N, Q, H], zero for padding; and None for the weights.
    """
    pack: DividedPack = arguments[SEQUENCES_ARGUMENT]
    ranks = pack.ranks
    _check_heads(query_1QNH.shape[1], ranks.size)
    # Ranks that share a key-value head each receive a copy of it.
    copies = math.lcm(key_1KNH.shape[1], ranks.size) // key_1KNH.shape[1]
    tensors = [query_1QNH, *(x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (key_1KNH, value_1KNH))]
    query_1QTH, key_1KTH, value_1KTH = (
        cast('Tensor', _Heads.apply(x[0].transpose(0, 1), ranks.anchor, pack)).transpose(0, 1)[None] for x in tensors
    )
    arguments[SEQUENCES_ARGUMENT] = pack.sequences
    output_1TQH, _ = packed_attention(module, query_1QTH, key_1KTH, value_1KTH, attention_mask, scaling, **arguments)
    return cast('Tensor', _Rows.apply(output_1TQH[0], ranks.anchor, pack))[None], None


class UlyssesSharding:
    """Implements `twinkle.nn.BaseSharding` for ranks that divide rows.

    Args:
        ranks: the ranks.
        head_path: module path of the output head, which runs on all rows on every rank.
        weights: division of the weights; None if they are complete on every rank.
    """

    def __init__(self, ranks: UlyssesRanks, *, head_path: str, weights: BaseSharding | None = None) -> None:
        self._ranks = ranks
        self._head_path = head_path
        self._weights = weights

    @property
    def needs_every_rank(self) -> bool:
        """Whether the division of the weights needs every rank. The exchange of rows needs only the ranks of a pass."""
        return self._weights is not None and self._weights.needs_every_rank

    def whole_weights(self) -> AbstractContextManager[None]:
        """Return the context of the division of the weights."""
        return nullcontext() if self._weights is None else self._weights.whole_weights()

    def running_pass(self) -> AbstractContextManager[None]:
        """Return the context of the division of the weights."""
        return nullcontext() if self._weights is None else self._weights.running_pass()

    @property
    def pass_inputs(self) -> Sequence[Tensor]:
        """The inputs that make a backward pass run every exchange, and the inputs for the division of the weights."""
        return [self._ranks.anchor, *(() if self._weights is None else self._weights.pass_inputs)]

    def gathered(self, parameter: Tensor) -> Tensor:
        """Return the full tensor of a weight. Every rank must call it."""
        return parameter if self._weights is None else self._weights.gathered(parameter)

    def agree(self, errors: Sequence[Exception | None]) -> list[Exception | None]:
        """Return each adapter's first error in rank order, or None. All ranks of a pass must call this method."""
        return agreed_errors(errors, group=self._ranks.group)

    def complete(self, gradients: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Return the sums of the gradients of all rows. Gradients of the output head are already complete."""
        completed = [gradient for _, gradient in gradients]
        partial = [index for index, (path, _) in enumerate(gradients) if path != self._head_path]
        if partial:
            flat = torch.cat([completed[index].reshape(-1) for index in partial])
            counts = [completed[index].numel() for index in partial]
            parts: Sequence[Tensor] = torch.split(_summed(flat, self._ranks.group), counts)
            for index, part in zip(partial, parts, strict=True):
                completed[index] = part.view_as(completed[index])
        return completed


def _check_text(config: Any, size: int, *, has_media: bool) -> None:
    """Check a text model's configuration; see `check_divisible`."""
    if has_media:
        raise UnsupportedModel('ulysses_size supports only text models; leave it out of the mesh')
    if 'linear_attention' in (getattr(config, 'layer_types', None) or ()):
        raise UnsupportedModel(
            'ulysses_size does not support Gated DeltaNet layers, which read rows one after the other; leave it out of '
            'the mesh, or use fsdp_size'
        )
    _check_heads(config.num_attention_heads, size)


def _check_heads(heads: int, size: int) -> None:
    if heads % size:
        raise UnsupportedModel(
            f'ulysses_size {size} must divide num_attention_heads ({heads}) of the model; change it in the mesh'
        )


def _summed(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks, added in the order of the ranks.

    The order in an all-reduce can depend on the position of an element, and thus on the other adapters of a pass.
    """
    size = group.size()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % size))
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    total, *others = received.chunk(size)
    for other in others:
        total = total + other
    whole = torch.empty_like(padded)
    dist.all_gather(list(whole.chunk(size)), total.contiguous(), group=group)
    return whole[: flat.numel()]


AttentionInterface.register(IMPLEMENTATION, ulysses_attention)
