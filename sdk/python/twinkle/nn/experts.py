"""Mixtures of experts with the updates of adapters. A row's result does not depend on the other rows of a pack.

The number of rows that an expert receives depends on all tokens of a pass, and it affects the rounding of products.
`PackedExperts` pads the rows of each expert to a count at which products are stable (`twinkle.nn.rows`). It adds the
outputs of a token's experts in the order in which the router chose them. The rows of an expert keep the order of the
pack, so the rows of one adapter stay consecutive and have the layout that `twinkle.nn.span_kernels` expects.

Legend: T rows of the pack, A experts per token, S = T A pairs of a token and an expert, N rows of one expert, D hidden
size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

from twinkle.data_format.lora import is_expert_weight
from twinkle.nn.active_adapters import ActiveAdapters, ExpertSpan, LayerSpan
from twinkle.nn.errors import UnsupportedModel
from twinkle.nn.gated_mlp import gate_of
from twinkle.nn.lora_linear import AdaptedLinear
from twinkle.nn.row_products import is_special
from twinkle.nn.rows import pad_rows, padded_row_count

_ROW_MULTIPLE = 4
"""Multiple to which the rows of an expert are padded; see `twinkle.nn.rows`."""
_DOWN = 'down_proj'

Spans = Mapping[str, Sequence[LayerSpan]]
"""Updates of the rows of one expert, by the name of the stacked weights."""


@dataclass(frozen=True)
class ExpertShare:
    """Experts of a layer that one rank has."""

    own: range
    """Consecutive indexes of the experts."""
    count: int
    """Number of experts of the whole layer."""


class PackedExperts(nn.Module):
    """Experts of a mixture.

    Args:
        experts: module of transformers that `is_experts` recognizes; its weights are read in each pass.
        path: module path of the experts in the model.
        active: holder of the running pass's adapters.
        share: experts that this rank has; None if the rank has all experts.
    """

    def __init__(self, experts: Any, *, path: str, active: ActiveAdapters, share: ExpertShare | None = None) -> None:
        super().__init__()
        self.source = experts
        self._first = 'gate_up_proj' if experts.has_gate else 'up_proj'
        self._is_transposed, self._has_bias = experts.is_transposed, experts.has_bias
        self._gate = _gate_of(experts)
        self._widths = {*experts.down_proj.shape[1:], *getattr(experts, self._first).shape[1:]}
        self._share = share or ExpertShare(range(len(experts.down_proj)), len(experts.down_proj))
        self._path, self._active = path, active

    @property
    def target_shapes(self) -> dict[str, tuple[int, int, int]]:
        """`(experts, in_features, out_features)` of each stacked weight that accepts adapters, by module path."""
        if self._is_transposed:
            return {}
        shapes = {f'{self._path}.{name}': getattr(self.source, name).shape for name in (self._first, _DOWN)}
        return {
            path: (self._share.count, inputs, outputs)
            for path, (_, outputs, inputs) in shapes.items()
            if is_expert_weight(path)
        }

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return float [T, D], the weighted sum of the outputs of each token's experts.

        If this rank has only some of the experts, the sum covers only these; the caller adds the sums of all ranks.

        Args:
            hidden_states: float [T, D].
            top_k_index: int64 [T, A], indexes of the experts of each token.
            top_k_weights: float [T, A], their weights.
        """
        rows, choices = top_k_index.shape
        # Each pair reads a separate copy of the token, so that gradients are also added in the order of the choices.
        pairs_SD = hidden_states[:, None].expand(rows, choices, -1).reshape(rows * choices, -1)
        order_S = top_k_index.flatten().argsort(stable=True)
        counts, spans = self._divide(top_k_index)
        own, begin = self._share.own, sum(counts[: self._share.own.start])
        own_counts = counts[own.start : own.stop]
        parts = pairs_SD.index_select(0, order_S[begin : begin + sum(own_counts)]).split(own_counts)
        outputs = [self._expert(index, part, spans[index]) for index, part in zip(own, parts, strict=True) if len(part)]
        if len(own) < self._share.count:
            # Other ranks have the other experts.
            before, after, width = begin, len(order_S) - begin - sum(own_counts), hidden_states.shape[-1]
            zeros = pairs_SD.new_zeros(before, width)
            outputs = [_Connected.apply(zeros, *self._factors()), *outputs, pairs_SD.new_zeros(after, width)]
        output_TAD = torch.cat(outputs).index_select(0, order_S.argsort()).unflatten(0, (rows, choices))
        return (output_TAD * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)

    def _factors(self) -> list[Tensor]:
        """Return the factors of all updates of the running pass."""
        spans = (self._active.expert_spans_at(f'{self._path}.{name}') for name in (self._first, _DOWN))
        return [factor for own in spans for span in own for factor in span.update.parameters()]

    def _divide(self, index_TA: Tensor) -> tuple[list[int], list[Spans]]:
        """Return the number of rows and the updates of each expert."""
        spans = {name: self._active.expert_spans_at(f'{self._path}.{name}') for name in (self._first, _DOWN)}
        found = [span for own in spans.values() for span in own]
        if found and len(index_TA) != self._active.row_count:
            raise UnsupportedModel(
                f'{self._path} got {len(index_TA)} rows in a pass of {self._active.row_count}; pass all rows'
            )
        borders = sorted({row for span in found for row in (span.begin_row, span.end_row)})
        table = _rows_before(index_TA, borders, expert_count=self._share.count)
        by_expert: list[dict[str, list[LayerSpan]]] = [{} for _ in table]
        for name, own in spans.items():
            for span in own:
                _add_layer_spans(by_expert, name, span, borders=borders, table=table)
        return [rows[-1] for rows in table], [*by_expert]

    def _expert(self, index: int, x_ND: Tensor, spans: Spans) -> Tensor:
        """Return [N, D], the output of one expert for its rows."""
        count = -(-padded_row_count(len(x_ND), self._widths) // _ROW_MULTIPLE) * _ROW_MULTIPLE
        padded = pad_rows(x_ND, count) if count > len(x_ND) else x_ND.clone()
        inner = self._gate(self._linear(self._first, index, padded, spans.get(self._first, ())))
        return self._linear(_DOWN, index, inner, spans.get(_DOWN, ()))[: len(x_ND)]

    def _linear(self, name: str, index: int, x: Tensor, spans: Sequence[LayerSpan]) -> Tensor:
        position = index - self._share.own.start
        weights: Tensor = getattr(self.source, name)
        biases: Tensor | None = getattr(self.source, f'{name}_bias') if self._has_bias else None
        weight, bias = weights[position], None if biases is None else biases[position]
        if self._is_transposed:
            weight = weight.T
        if not spans and not is_special(x, weights, biases):
            return linear(x, weight, bias)
        parameters = [tensor for span in spans for tensor in span.update.parameters()]
        return AdaptedLinear.apply(x, weight, bias, spans, *parameters)


def _rows_before(index_TA: Tensor, borders: Sequence[int], *, expert_count: int) -> list[list[int]]:
    """Return, for each expert, its number of rows from the tokens before each border, and from all tokens.

    The counts of all experts reach the host in one transfer.
    """
    part_count = len(borders) + 1
    rows_T = torch.arange(len(index_TA), device=index_TA.device)
    part_T = torch.bucketize(rows_T, torch.tensor(borders, device=index_TA.device), right=True)
    counts = torch.bincount((index_TA * part_count + part_T[:, None]).flatten(), minlength=expert_count * part_count)
    return counts.unflatten(0, (expert_count, part_count)).cumsum(1).tolist()


def _add_layer_spans(
    by_expert: list[dict[str, list[LayerSpan]]],
    name: str,
    span: ExpertSpan,
    *,
    borders: Sequence[int],
    table: list[list[int]],
) -> None:
    """Divide an adapter's update among the experts that receive rows of the adapter."""
    begin, end = borders.index(span.begin_row), borders.index(span.end_row)
    for found, rows, update in zip(by_expert, table, span.update.by_expert(), strict=True):
        if rows[begin] < rows[end]:
            found.setdefault(name, []).append(LayerSpan(rows[begin], rows[end], update, None))


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has the attributes of transformers' modules with stacked expert weights."""
    return all(hasattr(module, name) for name in ('has_gate', 'has_bias', 'is_transposed', '_apply_gate', 'down_proj'))


def _gate_of(experts: Any) -> Any:
    """Return the function between the two products of an expert, as one autograd node if its activation is known."""
    if not experts.has_gate:
        return experts.act_fn
    # Models whose gate clips or interleaves its halves define their own method.
    apply_gate: Any = experts._apply_gate  # noqa: SLF001 - no public name exists
    gate = gate_of(experts.act_fn) if apply_gate.__name__ == '_default_apply_gate' else None
    if gate is None:
        return apply_gate
    return lambda x: gate.apply(*(half.contiguous() for half in x.chunk(2, dim=-1)))


class _Connected(Function):
    """Identity whose result also depends on other tensors, which get no gradient.

    Without it, the output of a rank would not depend on an adapter that has no rows at the experts of the rank. The
    backward pass would then skip sums in other layers for which the other ranks wait.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.count = len(others)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return (*grad_outputs, *[None] * ctx.count)
