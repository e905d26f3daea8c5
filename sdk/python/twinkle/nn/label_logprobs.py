"""Log-probabilities of labels without ever holding all logits.

Legend: R rows, D hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from twinkle.nn.rows import BLOCK_ROWS, MIN_ROWS, pad_rows


class LabelLogprobs(Function):
    """`log softmax(z / temperature)[label]` with `z = softcap(h W^T + bias)`, for a frozen head.

    With p the softmax, the gradient of a row's value by its hidden state is
    `(onehot(label) - p) W / temperature`, a [D] vector that does not depend on what follows. It is
    computed in the forward pass while the block's softmax is at hand, so that no block is computed
    twice and the backward pass is one multiplication.
    """

    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, labels_R: Tensor, head: 'HeadWeights', temperature: float) -> Tensor:
        """Return float32 [R]."""
        is_gradient_needed = ctx.needs_input_grad[0]
        values: list[Tensor] = []
        jacobians: list[Tensor] = []
        for begin in range(0, hidden_RD.shape[0], BLOCK_ROWS):
            block_BD = hidden_RD[begin : begin + BLOCK_ROWS]
            labels_B = labels_R[begin : begin + BLOCK_ROWS]
            logits_BV = head.logits(block_BD) / temperature
            normaliser_B = logits_BV.logsumexp(dim=-1)
            values.append(logits_BV.gather(1, labels_B[:, None])[:, 0] - normaliser_B)
            if is_gradient_needed:
                jacobians.append(head.logprob_jacobian(logits_BV, normaliser_B, labels_B, temperature=temperature))
        if is_gradient_needed:
            ctx.save_for_backward(torch.cat(jacobians))
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, gradient_R: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Return the gradient by the hidden states."""
        (jacobian_RD,) = ctx.saved_tensors
        return (gradient_R[:, None] * jacobian_RD).to(jacobian_RD.dtype), None, None, None


class HeadWeights:
    """The frozen output head: `z = softcap tanh((h W^T + bias) / softcap)`."""

    def __init__(self, weight_VD: Tensor, bias_V: Tensor | None, *, softcap: float | None) -> None:
        self.weight_VD = weight_VD
        self._bias_V = bias_V
        self._softcap = softcap

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return float32 [R, V]."""
        padded = pad_rows(hidden_RD, MIN_ROWS)
        logits = linear(padded, self.weight_VD, self._bias_V)[: hidden_RD.shape[0]].float()
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    def logprob_jacobian(
        self, logits_BV: Tensor, normaliser_B: Tensor, labels_B: Tensor, *, temperature: float
    ) -> Tensor:
        """Return the gradient of each row's label log-probability by its hidden state, [B, D].

        Args:
            logits_BV: after softcap and temperature; overwritten.
            normaliser_B: their logsumexp.
            labels_B: int64.
            temperature: that `logits_BV` were divided by.
        """
        slope_BV = None
        if self._softcap is not None:
            slope_BV = 1.0 - (logits_BV * (temperature / self._softcap)) ** 2
        gradient_BV = logits_BV.sub_(normaliser_B[:, None]).exp_().neg_()
        gradient_BV.scatter_add_(1, labels_B[:, None], torch.ones_like(normaliser_B)[:, None])
        gradient_BV /= temperature
        if slope_BV is not None:
            gradient_BV *= slope_BV
        padded = pad_rows(gradient_BV.to(self.weight_VD.dtype), MIN_ROWS)
        return (padded @ self.weight_VD)[: labels_B.shape[0]]
