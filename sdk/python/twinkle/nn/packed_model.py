"""Base class of frozen causal language models that run packed sequences with many adapters.

Legend: T rows of the pack, R any selection of rows, K candidates of a row, D hidden size, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from twinkle.data_format import MediaSpec
from twinkle.nn.active_adapters import ActiveAdapters, LayerSpan, Pass
from twinkle.nn.errors import PackError
from twinkle.nn.expert_routing import ExpertRouting, RoutingShape
from twinkle.nn.head import HeadOutputs, run_head
from twinkle.nn.head_weights import HeadAdapter, HeadWeights
from twinkle.nn.kernel_layer import KernelLayer
from twinkle.nn.kv_cache import CacheSize, KVCache
from twinkle.nn.media import MediaSpan
from twinkle.nn.row_layout import RowLayout, RowRanks, rank_row_count
from twinkle.nn.rows import pad_rows, padded_row_count
from twinkle.nn.sequences import PackedSequences
from twinkle.nn.sharding import BaseSharding
from twinkle.nn.spans import AdapterSpan, SequenceSpan, check_spans
from twinkle.nn.targets import TargetLayers


class PackedModel(ABC):
    """Frozen decoder-only model whose linear layers all accept adapters.

    Subclasses run the layers and name the weights. Concurrency: one forward pass at a time, in one thread.

    Args:
        config: configuration of the text model, with the attributes of transformers.
        head: output head, a linear layer; its `forward` is not called.
        head_path: module path of the head.
        layers: module path to `(in_features, out_features)` of each linear layer except the head, in order.
        widths: column counts of the matrix products of a pass; they determine the padding of its rows.
        active: holder of the running pass's adapters, which the layers read.
    """

    media: MediaSpec | None = None
    """Specification of the images, videos or audio that the model reads; None for a text model."""
    experts: Mapping[str, tuple[int, int, int]] = MappingProxyType({})
    """Path to `(experts, in_features, out_features)` of each stacked weight of experts that accepts adapters."""
    is_quantized: bool = False
    """Whether the weights of linear layers are stored in four bits, and are not among `base_parameters`."""
    routing: RoutingShape | None = None
    """Sizes of the routing of tokens to experts; None if the routing can be neither recorded nor replaced."""

    def __init__(
        self,
        config: Any,
        *,
        head: Any,
        head_path: str,
        layers: Mapping[str, tuple[int, int]],
        widths: set[int],
        active: ActiveAdapters,
    ) -> None:
        self.config = config
        self.sharding: BaseSharding | None = None
        """Division of the model among several ranks; None if this process has the whole model."""
        self.row_ranks: RowRanks | None = None
        """Ranks that divide the rows of each pass; None if this process runs all rows."""
        self.head_layer, self.head_path = head, head_path
        self.layers = dict(layers)
        """Module path to `(in_features, out_features)`, in the model's order, without the output head."""
        self.can_share_prefixes = True
        """Whether spans with a parent give the results of separate sequences; see `twinkle.nn.probe`."""
        self._active = active
        self._widths = widths
        self._softcap: float | None = getattr(config, 'final_logit_softcapping', None)
        self._logit_scale = _logit_scale_of(config)

    @abstractmethod
    def _run(self, ids: Tensor, position_ids: Tensor, sequences: Any, media: Any) -> Tensor:
        """Return float [T, D], the result of all layers except the head, for int64 [T] ids that are padded.

        The attention layers receive `sequences`: `PackedSequences` or the result of `RowRanks.for_attention`.
        """

    @property
    @abstractmethod
    def base_parameters(self) -> dict[str, Tensor]:
        """Frozen weights of this rank by the model's parameter names; tied weights occur once."""

    @abstractmethod
    def base_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each frozen weight whole, with its name; every rank of a sharded model must read all of them."""

    @property
    @abstractmethod
    def parameter_count(self) -> int:
        """Number of scalars in the frozen model, on all ranks together."""

    @property
    @abstractmethod
    def kernel_layers(self) -> list[KernelLayer]:
        """Layers whose arithmetic an external kernel can replace, in the model's order."""

    @cached_property
    def targets(self) -> TargetLayers:
        """`layers`, the experts and the output head: every layer that accepts an adapter."""
        shape = (self.head_layer.in_features, self.head_layer.out_features)
        return TargetLayers(self.layers, head=self.head_path, shape=shape, experts=self.experts)

    def whole_weights(self) -> AbstractContextManager[None]:
        """Return the context of `BaseSharding.whole_weights`, for passes outside of `BaseSharding.running_pass`."""
        return nullcontext() if self.sharding is None else self.sharding.whole_weights()

    @property
    def _head(self) -> HeadWeights:
        return HeadWeights(self.head_layer.weight, self.head_layer.bias, self._softcap)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Maximum sequence length, in tokens."""
        return self.config.max_position_embeddings

    @cached_property
    def cache_size(self) -> CacheSize:
        """Memory of the `KVCache` of one sequence, as measured with a pass of one token."""
        cache, token = KVCache(), torch.zeros(1, dtype=torch.int64, device=self.device)
        with torch.no_grad():
            self.hidden(token, token, sequences=[SequenceSpan(0, 1, cache)])
        return cache.size

    @property
    def dtype_name(self) -> str:
        """Name of the torch dtype of the frozen weights."""
        return str(self._head.weight_VD.dtype).removeprefix('torch.')

    @property
    def device(self) -> torch.device:
        """Device of the model; inputs must be on it."""
        return self._head.weight_VD.device

    def hidden(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        *,
        sequences: Sequence[SequenceSpan],
        adapters: Sequence[AdapterSpan] = (),
        media: Sequence[MediaSpan] = (),
        routing: ExpertRouting | None = None,
    ) -> Tensor:
        """Run the pack through all layers except the head.

        Args:
            input_ids_T: int64 [T].
            position_ids_T: int64 [T], the position of each token within its sequence; for a model with a vision or
                audio tower also [3, T], the positions on the time, height and width axes.
            sequences: spans that cover all rows in order.
            adapters: disjoint spans in order; rows outside them use the base model. Gradients are recorded under
                torch's grad mode for the adapters whose weights require them.
            media: images, videos and clips whose tokens are among the rows.
            routing: records and replaces the experts of the rows; created with `routing` of this model.

        Returns:
            float [T, D], after the final norm.

        Raises:
            PackError: there are no rows, or the positions or spans do not fit them; media or positions with several
                axes were given to a text model; or a cache or `routing` was given although ranks divide the rows.
        """
        row_count = input_ids_T.shape[0]
        if row_count == 0 or position_ids_T.shape[-1:] != input_ids_T.shape:
            raise PackError('input_ids and position_ids must have the same length and at least one token')
        if self.media is None and (media or position_ids_T.dim() != 1):
            raise PackError('this model reads only text; leave media out and give one position per token')
        check_spans(row_count, sequences, adapters)
        if self.row_ranks is not None and routing is not None:
            raise PackError('experts can be neither recorded nor replaced while ulysses ranks divide the rows')
        packed = PackedSequences.of(sequences, self._head.weight_VD)
        if self.row_ranks is not None:
            return self._run_own_rows(self.row_ranks, input_ids_T, position_ids_T, packed, adapters)
        padded_count = self.padded_count(row_count)
        ids = pad_rows(input_ids_T, padded_count)
        with self._active.activate(Pass(adapters, row_count=padded_count, routing=routing)):
            return self._run(ids, position_ids_T, packed, media)[:row_count]

    def _run_own_rows(
        self,
        ranks: RowRanks,
        ids_T: Tensor,
        position_ids_T: Tensor,
        sequences: PackedSequences,
        adapters: Sequence[AdapterSpan],
    ) -> Tensor:
        """Run the layers on the rows of this rank, and return the rows of all ranks."""
        layout = RowLayout.of(len(ids_T), adapters, ranks, widths=self._widths, device=ids_T.device)
        received = ranks.for_attention(layout, sequences)
        with self._active.activate(Pass(layout.adapters, row_count=layout.row_count)):
            own_ND = self._run(layout.own(ids_T), layout.own(position_ids_T), received, ())
        return ranks.all_rows(own_ND, layout)

    def padded_count(self, *row_counts: int) -> int:
        """Return the number of rows of a pass, including padding, summed over the ranks.

        Args:
            row_counts: number of rows of each adapter.
        """
        if self.row_ranks is not None:
            return self.row_ranks.size * rank_row_count(row_counts, self.row_ranks.size, self._widths)
        return padded_row_count(sum(row_counts), self._widths)

    def logits(self, hidden_RD: Tensor, *, adapters: Sequence[AdapterSpan] = ()) -> Tensor:
        """Return float32 [R, V], the logits of some rows. All logits are materialized, so pass few rows.

        Args:
            hidden_RD: rows of the result of `hidden`.
            adapters: spans over these rows; only adapters with an update at the head have an effect.
        """
        used = [span for span in adapters if span.adapter is not None]
        updates = [span.adapter.update_of(self.head_path) for span in used]
        spans = [
            LayerSpan(span.begin_row, span.end_row, update, None)
            for span, update in zip(used, updates, strict=True)
            if update is not None
        ]
        return self._head.logits(self._scaled(hidden_RD), spans)

    def head_outputs(
        self,
        hidden_RD: Tensor,
        labels_R: Tensor,
        *,
        temperature: float | Tensor = 1.0,
        is_entropy_needed: bool = False,
        candidate_ids_RK: Tensor | None = None,
        adapter: HeadAdapter | None = None,
    ) -> HeadOutputs:
        """Compute the values that losses need from each row's distribution, block by block to bound memory.

        Only the requested values are computed. A row's results do not depend on the other rows.

        Args:
            hidden_RD: rows of the result of `hidden`.
            labels_R: int64 [R] in [0, vocab_size).
            temperature: positive divisor of the logits, one for all rows or float32 [R].
            is_entropy_needed: whether to compute entropies.
            candidate_ids_RK: int64 [R, K], token ids whose log-probabilities are computed in addition to the label's.
            adapter: update of the head for all these rows, if their adapter updates the head.
        """
        return run_head(
            self._scaled(hidden_RD),
            labels_R,
            replace(self._head, adapter=adapter),
            temperature=temperature,
            is_entropy_needed=is_entropy_needed,
            candidate_ids_RK=candidate_ids_RK,
        )

    def label_logprobs(self, hidden_RD: Tensor, labels_R: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Return float32 [R], the natural log-probability of each row's label."""
        return self.head_outputs(hidden_RD, labels_R, temperature=temperature).logps_R

    def _scaled(self, hidden_RD: Tensor) -> Tensor:
        """Return hidden states for which the head computes the model's logits, including their scale."""
        return hidden_RD if self._logit_scale == 1.0 else hidden_RD * self._logit_scale


def _logit_scale_of(config: Any) -> float:
    """Return the factor by which a model multiplies its logits."""
    if (scale := getattr(config, 'logit_scale', None)) is not None:
        return scale
    scaling = getattr(config, 'logits_scaling', None)
    if scaling is None:
        return 1.0
    # Granite divides by the field, and HyperCLOVA X multiplies by it.
    return scaling if config.model_type == 'hyperclovax' else 1.0 / scaling
