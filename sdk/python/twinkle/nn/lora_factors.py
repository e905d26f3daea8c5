"""Low-rank update of one layer (Hu et al. 2021, equation 3), forward and backward.

Factors are float32 master weights, and their gradients are float32. Products run in the dtype of the rows, which is the
base model's. A float32 copy of 16-bit rows is unnecessary: kernels accumulate in float32, and the update is added
before the sum is rounded.

Legend: S rows of one adapter, I inputs and O outputs of the layer, r (in names R) LoRA rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from twinkle.nn.layer_update import LayerDropout
from twinkle.nn.row_products import add_product, fast_product, product
from twinkle.nn.rows import pad_rows


@dataclass(frozen=True)
class LoraFactors:
    """`y += scaling B A dropout(x)`."""

    a: Tensor
    """float32 [r, I]."""
    b: Tensor
    """float32 [O, r]."""
    scaling: float
    saved_count: ClassVar[int] = 1

    def parameters(self) -> tuple[Tensor, Tensor]:
        """Return A and B."""
        return self.a, self.b

    def delta(self) -> Tensor:
        """Return float32 [O, I], the change of the layer's weight."""
        return (self.b @ self.a).mul_(self.scaling)

    def add_output(self, x_SI: Tensor, y_SO: Tensor, dropout: LayerDropout | None) -> tuple[Tensor]:
        """Add the update to `y_SO` in place; return `A dropout(x)`, [S, r]."""
        dropped_SI = x_SI if dropout is None else x_SI * dropout.mask(x_SI)
        # A single row would make this a matrix-vector product, whose rounding depends on the number of rows.
        a_RI = pad_rows(self.a, 2).to(x_SI.dtype)
        z_SR = product(dropped_SI, a_RI.t())[:, : self.a.shape[0]]
        add_product(y_SO, z_SR, self.b.to(x_SI.dtype).t(), scaling=self.scaling)
        return (z_SR,)

    def add_gradient(
        self, x_SI: Tensor, dy_SO: Tensor, dx_SI: Tensor | None, saved: Sequence[Tensor], dropout: LayerDropout | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Add the update's gradient to `dx_SI` in place, if given; return the gradients of A and B."""
        (z_SR,) = saved
        # Products with few rows are up to three times as fast on CPUs as products with few columns. The forward
        # product is not transposed, because the rounding of a pack row would then depend on the other rows.
        dz_RS = fast_product(self.b.to(dy_SO.dtype).t(), dy_SO.t()).mul_(self.scaling)
        mask_SI = None if dropout is None else dropout.mask(x_SI)
        da_RI = db_OR = None
        if self.a.requires_grad:
            da_RI = fast_product(dz_RS, x_SI if mask_SI is None else x_SI * mask_SI).to(self.a.dtype)
        if self.b.requires_grad:
            db_OR = fast_product(z_SR.t(), dy_SO).mul_(self.scaling).t().to(self.b.dtype).contiguous()
        if dx_SI is not None and mask_SI is None:
            dx_SI.addmm_(dz_RS.t(), self.a.to(dy_SO.dtype))
        elif dx_SI is not None:
            dx_SI.addcmul_(dz_RS.t() @ self.a.to(dy_SO.dtype), mask_SI)
        return da_RI, db_OR
