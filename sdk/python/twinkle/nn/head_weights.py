"""The output head: from hidden states to logits, and the way back.

Legend: R rows, B rows of one block, D hidden size, V vocabulary, K candidates.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from twinkle.nn.rows import MIN_ROWS, pad_rows


@dataclass(frozen=True)
class HeadWeights:
    """`z = softcap tanh((h W^T + bias) / softcap)`, or without the cap where there is none."""

    weight_VD: Tensor
    bias_V: Tensor | None
    softcap: float | None

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return float32 [R, V], which the caller may overwrite."""
        padded = pad_rows(hidden_RD, MIN_ROWS)
        logits = linear(padded, self.weight_VD, self.bias_V)[: hidden_RD.shape[0]].float()
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def block(self, hidden_BD: Tensor, temperature_B1: Tensor | None) -> 'HeadBlock':
        """Return the distributions of some rows. At least `MIN_ROWS`, which keeps a row's bits its own."""
        logits_BV = self.logits(hidden_BD)
        slope_BV = None
        if self.softcap is not None:
            slope_BV = 1.0 - (logits_BV / self.softcap) ** 2
        if temperature_B1 is not None:
            logits_BV /= temperature_B1
        return HeadBlock(self, logits_BV, slope_BV, temperature_B1)


class HeadBlock:
    """Distributions over the vocabulary of one block of rows."""

    def __init__(
        self, head: HeadWeights, logits_BV: Tensor, slope_BV: Tensor | None, temperature_B1: Tensor | None
    ) -> None:
        self._head = head
        self._slope_BV = slope_BV
        self._temperature_B1 = temperature_B1
        self.logits_BV = logits_BV
        """float32, after softcap and temperature."""
        self.softmax_BV = torch.softmax(logits_BV, dim=-1)
        largest_B, index_B = logits_BV.max(dim=-1)
        # The largest probability is 1 / sum exp(z - max z), at hand and never small.
        self.normaliser_B = largest_B - self._at(self.softmax_BV, index_B).log_()
        """logsumexp of the logits."""

    def logps(self, ids_BK: Tensor) -> Tensor:
        """Return float32 [B, K], the log-probabilities of some ids."""
        return self.logits_BV.gather(1, ids_BK) - self.normaliser_B[:, None]

    def entropies(self) -> Tensor:
        """Return float32 [B], in nats."""
        return self.normaliser_B - (self.softmax_BV * self.logits_BV).sum(dim=-1)

    def label_jacobian(self, labels_B: Tensor) -> Tensor:
        """Return [B, D], the gradient of each row's label log-probability by its hidden state.

        It is `(W[label] - softmax W) / temperature`, so that nothing of the vocabulary's width is written for it.
        """
        if self._slope_BV is not None:
            gradient_BV = torch.zeros_like(self.logits_BV).scatter_(1, labels_B[:, None], 1.0) - self.softmax_BV
            return self.by_hidden(self.by_raw_logits(gradient_BV))
        weight_VD = self._head.weight_VD
        jacobian_BD = weight_VD[labels_B] - self.softmax_BV.to(weight_VD.dtype) @ weight_VD
        return jacobian_BD if self._temperature_B1 is None else jacobian_BD / self._temperature_B1.to(weight_VD.dtype)

    def by_raw_logits(self, gradient_BV: Tensor) -> Tensor:
        """Turn the gradient by `logits_BV`, in place, into the one by the logits before temperature and softcap."""
        if self._temperature_B1 is not None:
            gradient_BV /= self._temperature_B1
        return gradient_BV if self._slope_BV is None else gradient_BV.mul_(self._slope_BV)

    def by_hidden(self, gradient_BV: Tensor) -> Tensor:
        """Return [B, D] for the gradient by the raw logits."""
        return gradient_BV.to(self._head.weight_VD.dtype) @ self._head.weight_VD

    @staticmethod
    def _at(values_BV: Tensor, index_B: Tensor) -> Tensor:
        return values_BV.gather(1, index_B[:, None])[:, 0]
