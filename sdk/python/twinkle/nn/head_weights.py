"""Output head: logits of hidden states, and their gradients.

Legend: R rows, B rows of one block, D hidden size, V vocabulary, K candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle.nn.active_adapters import LayerSpan
from twinkle.nn.dropout import RowDropout
from twinkle.nn.layer_update import LayerDropout, LayerUpdate
from twinkle.nn.row_products import product
from twinkle.nn.rows import MIN_ROWS, pad_rows
from twinkle.nn.span_kernels import kernel_for


@dataclass(frozen=True)
class HeadAdapter:
    """Update of the head by one adapter in one pass."""

    update: LayerUpdate
    dropout: RowDropout | None = None
    """Dropout of the adapter; None without dropout, or if the pass is not for training."""
    first_layer: int = 0
    """Layer index of the first block of rows; block i uses the dropout mask of layer `first_layer + i`."""

    def block_dropout(self, block: int) -> LayerDropout | None:
        """Return the dropout of a block of rows."""
        return None if self.dropout is None else LayerDropout(self.dropout, self.first_layer + block)


@dataclass(frozen=True)
class HeadWeights:
    """`z = softcap tanh((h W^T + bias) / softcap)`, or `h W^T + bias` without a softcap."""

    weight_VD: Tensor
    bias_V: Tensor | None
    softcap: float | None
    adapter: HeadAdapter | None = None
    """Update that `run_head` applies to all rows."""

    def logits(self, hidden_RD: Tensor, spans: Sequence[LayerSpan] = ()) -> Tensor:
        """Return float32 [R, V], which the caller may overwrite; each adapter changes only its own rows."""
        padded = pad_rows(hidden_RD, MIN_ROWS)
        raw = product(padded, self.weight_VD.t(), self.bias_V)
        if spans:
            kernel_for(spans, padded).add_output(spans, padded, raw)
        return self.capped(raw[: hidden_RD.shape[0]])

    def capped(self, raw_RV: Tensor) -> Tensor:
        """Return the logits as float32, with the model's softcap, if any; `raw_RV` may be overwritten."""
        logits = raw_RV.float()
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def block(
        self, hidden_BD: Tensor, temperature_B1: Tensor | None, *, head_update: 'HeadUpdate | None' = None
    ) -> 'HeadBlock':
        """Return the distributions of at least `MIN_ROWS` rows; with fewer, results would depend on the row count."""
        raw_BV = product(hidden_BD, self.weight_VD.t(), self.bias_V)
        if head_update is not None:
            head_update.add_output(hidden_BD, raw_BV)
        logits_BV = self.capped(raw_BV)
        slope_BV = None
        if self.softcap is not None:
            slope_BV = 1.0 - (logits_BV / self.softcap) ** 2
        if temperature_B1 is not None:
            logits_BV /= temperature_B1
        return HeadBlock(self, logits_BV, slope_BV, temperature_B1, head_update)


class HeadUpdate:
    """Update of the head by an adapter on one block of rows.

    Args:
        update: the adapter's update of the head.
        dropout: the adapter's dropout on these rows.
    """

    def __init__(self, update: LayerUpdate, dropout: LayerDropout | None) -> None:
        self._update, self._dropout = update, dropout
        self._hidden_BD = torch.empty(0)
        self._saved: tuple[Tensor, ...] = ()

    def add_output(self, hidden_BD: Tensor, raw_BV: Tensor) -> None:
        """Add the update to the logits in place."""
        self._hidden_BD = hidden_BD
        self._saved = self._update.add_output(hidden_BD, raw_BV, self._dropout)

    def add_gradient(self, gradient_BV: Tensor, by_hidden_BD: Tensor) -> Sequence[Tensor | None]:
        """Add the update's part of the hidden states' gradient in place; return the gradients of the parameters."""
        return self._update.add_gradient(self._hidden_BD, gradient_BV, by_hidden_BD, self._saved, self._dropout)


class HeadBlock:
    """Distributions over the vocabulary of one block of rows."""

    def __init__(
        self,
        head: HeadWeights,
        logits_BV: Tensor,
        slope_BV: Tensor | None,
        temperature_B1: Tensor | None,
        head_update: HeadUpdate | None = None,
    ) -> None:
        self._head = head
        self._head_update = head_update
        self._slope_BV = slope_BV
        self._temperature_B1 = temperature_B1
        self.logits_BV = logits_BV
        """float32, after softcap and temperature."""
        self.softmax_BV = torch.softmax(logits_BV, dim=-1)
        self.normalizer_B = _normalizer(logits_BV, self.softmax_BV)
        """logsumexp of the logits."""

    def logps(self, ids_BK: Tensor) -> Tensor:
        """Return float32 [B, K], the log-probabilities of some ids."""
        return self.logits_BV.gather(1, ids_BK) - self.normalizer_B[:, None]

    def entropies(self) -> Tensor:
        """Return the entropy of each row, float32 [B], in nats."""
        return self.normalizer_B - (self.softmax_BV * self.logits_BV).sum(dim=-1)

    def label_jacobian(self, labels_B: Tensor) -> Tensor:
        """Return [B, D], the gradient of each row's label log-probability with respect to its hidden state.

        With weights W and no softcap, the gradient is `(W[label] - softmax W) / temperature`, so the [B, V] gradient of
        the logits is not allocated.
        """
        if self._slope_BV is not None:
            gradient_BV = torch.zeros_like(self.logits_BV).scatter_(1, labels_B[:, None], 1.0) - self.softmax_BV
            return self.by_hidden(self.by_raw_logits(gradient_BV))
        weight_VD = self._head.weight_VD
        jacobian_BD = weight_VD[labels_B] - product(self.softmax_BV.to(weight_VD.dtype), weight_VD)
        return jacobian_BD if self._temperature_B1 is None else jacobian_BD / self._temperature_B1.to(weight_VD.dtype)

    def by_raw_logits(self, gradient_BV: Tensor) -> Tensor:
        """Convert the gradient of `logits_BV` to the gradient of the raw logits; `gradient_BV` is overwritten."""
        if self._temperature_B1 is not None:
            gradient_BV /= self._temperature_B1
        return gradient_BV if self._slope_BV is None else gradient_BV.mul_(self._slope_BV)

    def by_hidden(self, gradient_BV: Tensor) -> Tensor:
        """Convert the gradient of the raw logits to the gradient of the hidden states, [B, D]."""
        return product(gradient_BV.to(self._head.weight_VD.dtype), self._head.weight_VD)

    def by_adapter(self, gradient_BV: Tensor, by_hidden_BD: Tensor) -> Sequence[Tensor | None]:
        """Add the adapter's part of the hidden states' gradient in place; return the gradients of its parameters."""
        if self._head_update is None:
            return ()
        return self._head_update.add_gradient(gradient_BV.to(self._head.weight_VD.dtype), by_hidden_BD)


def summed(totals: list[Tensor | None], more: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Add a block's gradients to `totals` in place, and return the sums; None where a tensor has no gradient."""
    if not totals:
        return list(more)
    return [None if a is None or b is None else a.add_(b) for a, b in zip(totals, more, strict=True)]


def log_probabilities(logits_RV: Tensor) -> Tensor:
    """Return float32 [R, V], natural log-probabilities, bitwise equal to a `HeadBlock`'s.

    Samplers use this function, so trainer and sampler agree. All values are materialized, so pass few rows.
    """
    return logits_RV - _normalizer(logits_RV, torch.softmax(logits_RV, dim=-1))[:, None]


def _normalizer(logits_RV: Tensor, softmax_RV: Tensor) -> Tensor:
    largest_R, index_R = logits_RV.max(dim=-1)
    # The largest probability is 1 / sum(exp(z - max z)); it is already computed, and at least 1 / V.
    return largest_R - softmax_RV.gather(1, index_R[:, None])[:, 0].log_()
