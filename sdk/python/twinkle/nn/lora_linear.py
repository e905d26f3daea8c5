"""Frozen linear layer to which each adapter adds its update on its own rows.

The layer is one autograd node for any number of adapters: the frozen product runs once over all rows, forward
and backward, and each update is applied in place to its rows of the result.

Legend: T rows of the pack, S rows of one adapter, I inputs and O outputs of the layer.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from twinkle.nn.active_adapters import ActiveAdapters, LayerSpan
from twinkle.nn.errors import UnsupportedModel
from twinkle.nn.four_bit import FourBitLinear, FourBitWeight
from twinkle.nn.layer_shard import LayerShard
from twinkle.nn.row_products import is_special, product
from twinkle.nn.span_kernels import kernel_for


class LoraLinear(nn.Module):
    """`y[t] = W x[t] + update(x[t])`, with the update of the adapter of row t.

    Args:
        base: frozen layer, whose weight is shared, not copied; it may be a `FourBitLinear`.
        path: module path of the layer in the model.
        layer: index of the layer in the model, which selects its dropout masks.
        active: holder of the running pass's adapters.
        shard: outputs or inputs of the whole layer that `base` computes, if other ranks compute the rest.
    """

    def __init__(
        self, base: nn.Linear, *, path: str, layer: int, active: ActiveAdapters, shard: LayerShard | None = None
    ) -> None:
        super().__init__()
        self.base = base
        self._path = path
        self._layer = layer
        self._active = active
        self._shard = shard

    @property
    def weight(self) -> Tensor:
        """Frozen weight; some models read its device or dtype."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return `y [..., O]` for `x [..., I]`; the leading axes are the rows of the pack."""
        spans = self._active.spans_at(self._path, layer=self._layer)
        weight = self.base.packed if isinstance(self.base, FourBitLinear) else self.base.weight
        if not spans and isinstance(weight, Tensor) and not is_special(x, weight, self.base.bias):
            return self.base(x)
        row_count = x.numel() // x.shape[-1]
        if spans and row_count != self._active.row_count:
            raise UnsupportedModel(
                f'{self._path} got {row_count} rows in a pass of {self._active.row_count}; pass all rows'
            )
        if self._shard is not None:
            spans = [self._shard.span(span) for span in spans]
        parameters = [tensor for span in spans for tensor in span.update.parameters()]
        x_TI = x.reshape(row_count, -1)
        y_TO: Tensor = AdaptedLinear.apply(x_TI, weight, self.base.bias, spans, *parameters)
        # Some models change the result in place, which autograd forbids for a view that the function made itself.
        return y_TO.view(*x.shape[:-1], -1)


class AdaptedLinear(Function):
    """`LoraLinear` as one autograd node, with or without spans. The frozen weight has no gradient.

    A weight in four bits is restored in both passes, and not kept between them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight: Tensor | FourBitWeight,
        bias_O: Tensor | None,
        spans: Sequence[LayerSpan],
        *parameters: Tensor,
    ) -> Tensor:
        weight_OI = weight if isinstance(weight, Tensor) else weight.restored()
        y_TO = product(x_TI, weight_OI.t(), bias_O)
        ctx.kernel = kernel_for(spans, x_TI)
        saved = ctx.kernel.add_output(spans, x_TI, y_TO)
        ctx.spans, ctx.saved_count = spans, len(saved)
        ctx.four_bit = None if isinstance(weight, Tensor) else weight
        kept = weight if isinstance(weight, Tensor) else x_TI[:0]
        # Without updates, the backward pass does not read the input.
        ctx.save_for_backward(x_TI if spans else x_TI[:0], kept, *saved, *parameters)
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, kept, *saved = ctx.saved_tensors
        # In other layouts, the rounding of products depends on the number of rows.
        dy_TO = dy_TO.contiguous()
        weight_OI = kept if ctx.four_bit is None else ctx.four_bit.restored()
        dx_TI = product(dy_TO, weight_OI) if ctx.needs_input_grad[0] else None
        gradients = ctx.kernel.add_gradient(ctx.spans, x_TI, dy_TO, dx_TI, saved[: ctx.saved_count])
        return (dx_TI, None, None, None, *gradients)
