"""Mixtures of experts whose rows do not depend on the other rows of a pack.

The number of rows that an expert receives depends on all tokens of a pass, and so would the rounding of its products.
`PackedExperts` pads the rows of each expert to a count at which products are stable (`twinkle.nn.rows`). It adds the
outputs of a token's experts in the order in which the router chose them.

Legend: T rows of the pack, A experts per token, S = T A pairs of a token and an expert, N rows of one expert, D hidden
size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from twinkle.nn.gated_mlp import gate_of
from twinkle.nn.rows import pad_rows, padded_row_count

_ROW_MULTIPLE = 4
"""Multiple to which the rows of an expert are padded; see `twinkle.nn.rows`."""


class PackedExperts(nn.Module):
    """Experts of a mixture, with the parameters of the replaced module under their names.

    Args:
        experts: module of transformers that `is_experts` recognizes.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        for name, parameter in experts.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self._first = 'gate_up_proj' if experts.has_gate else 'up_proj'
        self._is_transposed, self._has_bias = experts.is_transposed, experts.has_bias
        self._gate = _gate_of(experts)
        self._widths = {*self.down_proj.shape[1:], *getattr(self, self._first).shape[1:]}

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return float [T, D], the weighted sum of the outputs of each token's experts.

        Args:
            hidden_states: float [T, D].
            top_k_index: int64 [T, A], indexes of the experts of each token.
            top_k_weights: float [T, A], their weights.
        """
        rows, choices = top_k_index.shape
        # Each pair reads its own copy of the token, so that gradients are added in the order of the choices, too.
        pairs_SD = hidden_states[:, None].expand(rows, choices, -1).reshape(rows * choices, -1)
        order_S = top_k_index.flatten().argsort(stable=True)
        counts = torch.bincount(top_k_index.flatten(), minlength=len(self.down_proj)).tolist()
        parts = pairs_SD.index_select(0, order_S).split(counts)
        outputs = [self._expert(index, part) for index, part in enumerate(parts) if len(part)]
        output_TAD = torch.cat(outputs).index_select(0, order_S.argsort()).unflatten(0, (rows, choices))
        return (output_TAD * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)

    def _expert(self, index: int, x_ND: Tensor) -> Tensor:
        """Return [N, D], the output of one expert for its rows."""
        count = -(-padded_row_count(len(x_ND), self._widths) // _ROW_MULTIPLE) * _ROW_MULTIPLE
        padded = pad_rows(x_ND, count) if count > len(x_ND) else x_ND.clone()
        inner = self._gate(self._linear(self._first, index, padded))
        return self._linear('down_proj', index, inner)[: len(x_ND)]

    def _linear(self, name: str, index: int, x: Tensor) -> Tensor:
        weight = getattr(self, name)[index]
        bias = getattr(self, f'{name}_bias')[index] if self._has_bias else None
        return linear(x, weight.T if self._is_transposed else weight, bias)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is a module of transformers with the stacked weights of all experts."""
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
