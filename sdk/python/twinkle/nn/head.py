"""Values that losses need from the output head, computed without materializing all logits.

Legend: R rows, B rows of one block, D hidden size, V vocabulary, K candidates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from twinkle.nn.head_weights import HeadAdapter, HeadBlock, HeadUpdate, HeadWeights, summed
from twinkle.nn.rows import MIN_ROWS, block_rows, pad_rows


@dataclass(frozen=True)
class HeadOutputs:
    """Requested values per row. Autograd can differentiate them once, with respect to hidden states and parameters."""

    logps_R: Tensor
    """float32, natural log-probability of each row's label."""
    entropies_R: Tensor | None = None
    """float32, in nats; of the distribution at the given temperature."""
    candidate_logps_RK: Tensor | None = None
    """float32, natural log-probabilities of each row's candidates."""


@dataclass(frozen=True)
class _Request:
    """Arguments of one call that are not differentiated."""

    labels_R: Tensor
    temperature_R1: Tensor | None
    is_entropy_needed: bool
    candidate_ids_RK: Tensor | None
    adapter: HeadAdapter | None

    @property
    def is_label_only(self) -> bool:
        return not self.is_entropy_needed and self.candidate_ids_RK is None and self.adapter is None


def run_head(
    hidden_RD: Tensor,
    labels_R: Tensor,
    head: HeadWeights,
    *,
    temperature: float | Tensor = 1.0,
    is_entropy_needed: bool = False,
    candidate_ids_RK: Tensor | None = None,
) -> HeadOutputs:
    """Compute the requested values of each row; see `PackedModel.head_outputs`."""
    row_count = hidden_RD.shape[0]
    if not row_count:
        empty_R = hidden_RD.sum(dim=-1, dtype=torch.float32)
        candidates_RK = None if candidate_ids_RK is None else empty_R[:, None].expand(candidate_ids_RK.shape)
        return HeadOutputs(empty_R, empty_R if is_entropy_needed else None, candidates_RK)
    temperature_R1 = None
    if isinstance(temperature, Tensor):
        temperature_R1 = temperature[:, None]
    elif temperature != 1.0:
        temperature_R1 = hidden_RD.new_full((row_count, 1), temperature, dtype=torch.float32)
    request = _Request(labels_R, temperature_R1, is_entropy_needed, candidate_ids_RK, head.adapter)
    parameters = () if head.adapter is None else head.adapter.update.parameters()
    return HeadOutputs(*_Head.apply(hidden_RD, head.weight_VD, head.bias_V, head.softcap, request, *parameters))


class _Head(Function):
    """Log-probabilities, entropies and candidates of rows, computed block by block.

    One case is faster: only the log-probabilities of labels are requested, and the head is frozen and has no adapter.
    The gradient of a row's hidden state is then a [D] vector times the row's upstream gradient. The forward pass
    computes this vector from the block's softmax, so no block is computed twice, and the backward pass is one
    multiplication. In all other cases, the backward pass recomputes the blocks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        softcap: float | None,
        request: _Request,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        head = HeadWeights(weight_VD, bias_V, softcap)
        is_head_trained = any(ctx.needs_input_grad[1:3])
        is_jacobian_stored = ctx.needs_input_grad[0] and request.is_label_only and not is_head_trained
        logps: list[Tensor] = []
        entropies: list[Tensor] = []
        candidates: list[Tensor] = []
        jacobians: list[Tensor] = []
        for rows, block in _blocks(head, hidden_RD, request):
            count = rows.stop - rows.start
            labels_B = pad_rows(request.labels_R[rows], MIN_ROWS)
            logps.append(block.logps(labels_B[:, None])[:count, 0])
            if request.is_entropy_needed:
                entropies.append(block.entropies()[:count])
            if request.candidate_ids_RK is not None:
                candidates.append(block.logps(pad_rows(request.candidate_ids_RK[rows], MIN_ROWS))[:count])
            if is_jacobian_stored:
                jacobians.append(block.label_jacobian(labels_B)[:count])
        ctx.request, ctx.softcap = request, softcap
        ctx.set_materialize_grads(False)
        ctx.is_jacobian_stored = is_jacobian_stored
        if is_jacobian_stored:
            ctx.save_for_backward(torch.cat(jacobians))
        else:
            ctx.has_bias = bias_V is not None
            ctx.save_for_backward(hidden_RD, weight_VD, *([] if bias_V is None else [bias_V]), *parameters)
        return torch.cat(logps), _joined(entropies), _joined(candidates)

    @staticmethod
    def backward(
        ctx: Any, d_logps_R: Tensor | None, d_entropies_R: Tensor | None, d_candidates_RK: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if ctx.is_jacobian_stored:
            (jacobian_RD,) = ctx.saved_tensors
            hidden = None if d_logps_R is None else (d_logps_R[:, None] * jacobian_RD).to(jacobian_RD.dtype)
            return hidden, None, None, None, None
        hidden_RD, weight_VD, *bias = ctx.saved_tensors
        bias = bias[: int(ctx.has_bias)]
        head = HeadWeights(weight_VD, bias[0] if bias else None, ctx.softcap)
        d_hidden_RD = torch.empty_like(hidden_RD)
        # Allocate zeros of the head's size only for tensors that need gradients; with adapters the head is frozen.
        wanted = zip((weight_VD, *bias), ctx.needs_input_grad[1:3], strict=False)
        by_head = [torch.zeros_like(tensor) if is_wanted else None for tensor, is_wanted in wanted]
        upstream = _Upstream(d_logps_R, d_entropies_R, d_candidates_RK)
        by_parameters: list[Tensor | None] = []
        for rows, block in _blocks(head, hidden_RD, ctx.request):
            gradient_BV = block.by_raw_logits(upstream.by_logits(ctx.request, rows, block))
            by_hidden_BD = block.by_hidden(gradient_BV)
            by_parameters = summed(by_parameters, block.by_adapter(gradient_BV, by_hidden_BD))
            d_hidden_RD[rows] = by_hidden_BD[: rows.stop - rows.start]
            _add_head_gradient(by_head, gradient_BV, hidden_RD[rows])
        d_weight_VD, d_bias_V = (*by_head, None)[:2]
        return d_hidden_RD, d_weight_VD, d_bias_V, None, None, *by_parameters


@dataclass(frozen=True)
class _Upstream:
    """Upstream gradients of the outputs; None for outputs that no loss used."""

    logps_R: Tensor | None
    entropies_R: Tensor | None
    candidates_RK: Tensor | None

    def by_logits(self, request: _Request, rows: slice, block: HeadBlock) -> Tensor:
        """Return float32 [B, V], the gradient with respect to the block's logits.

        With p the softmax and H the entropy: d log p_i / dz = onehot(i) - p, and dH / dz = -p (log p + H).
        """
        gradient_BV = torch.zeros_like(block.logits_BV)
        total_B1 = torch.zeros_like(block.normalizer_B)[:, None]
        ids = (request.labels_R[:, None], request.candidate_ids_RK)
        upstreams = (None if self.logps_R is None else self.logps_R[:, None], self.candidates_RK)
        for ids_RK, upstream_RK in zip(ids, upstreams, strict=True):
            if upstream_RK is not None:
                upstream_BK = pad_rows(upstream_RK[rows], MIN_ROWS)
                gradient_BV.scatter_add_(1, pad_rows(ids_RK[rows], MIN_ROWS), upstream_BK)
                total_B1 += upstream_BK.sum(dim=-1, keepdim=True)
        factor_BV = total_B1
        if self.entropies_R is not None:
            logps_BV = block.logits_BV - block.normalizer_B[:, None]
            upstream_B1 = pad_rows(self.entropies_R[rows], MIN_ROWS)[:, None]
            factor_BV = total_B1 + upstream_B1 * (logps_BV + block.entropies()[:, None])
        return gradient_BV.sub_(factor_BV * block.softmax_BV)


def _add_head_gradient(by_head: list[Tensor | None], gradient_BV: Tensor, hidden_BD: Tensor) -> None:
    """Add one block's contribution to the gradients of weight and bias, in place."""
    gradient_BV = gradient_BV[: hidden_BD.shape[0]].to(hidden_BD.dtype)
    d_weight_VD, d_bias_V = (*by_head, None)[:2]
    if d_weight_VD is not None:
        d_weight_VD.addmm_(gradient_BV.t(), hidden_BD)
    if d_bias_V is not None:
        d_bias_V.add_(gradient_BV.sum(dim=0))


def _blocks(head: HeadWeights, hidden_RD: Tensor, request: _Request) -> Iterator[tuple[slice, HeadBlock]]:
    size = block_rows(hidden_RD.device)
    for begin in range(0, hidden_RD.shape[0], size):
        rows = slice(begin, min(begin + size, hidden_RD.shape[0]))
        temperature_B1 = None
        if request.temperature_R1 is not None:
            given_B1 = request.temperature_R1[rows]
            # Padding rows have temperature 1, so they do not divide by zero.
            missing = max(MIN_ROWS - given_B1.shape[0], 0)
            temperature_B1 = torch.cat([given_B1, given_B1.new_ones((missing, 1))])
        hidden_BD = pad_rows(hidden_RD[rows], MIN_ROWS)
        yield rows, head.block(hidden_BD, temperature_B1, head_update=_head_update(request.adapter, begin // size))


def _head_update(adapter: HeadAdapter | None, block: int) -> HeadUpdate | None:
    return None if adapter is None else HeadUpdate(adapter.update, adapter.block_dropout(block))


def _joined(pieces: list[Tensor]) -> Tensor | None:
    return torch.cat(pieces) if pieces else None
