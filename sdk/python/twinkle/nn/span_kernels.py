"""Execution of the updates of one layer's spans: a loop over spans, or grouped products where kernels exist.

The loop runs on every device and is the reference that tests compare with. `kernel_for` chooses between the two.

Legend: T rows of the pack, S rows of one adapter, I inputs and O outputs of the layer.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from twinkle.nn.active_adapters import LayerSpan
from twinkle.nn.grouped_lora import GroupedLora, is_groupable
from twinkle.nn.rows import is_stable, stable_rows


class SpanKernel(Protocol):
    """Executor of the updates of one layer in one pass."""

    def add_output(self, spans: Sequence[LayerSpan], x_TI: Tensor, y_TO: Tensor) -> list[Tensor]:
        """Add each span's update to its rows of `y_TO` in place; return the tensors that `add_gradient` needs."""
        ...

    def add_gradient(
        self, spans: Sequence[LayerSpan], x_TI: Tensor, dy_TO: Tensor, dx_TI: Tensor | None, saved: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Add each span's gradient to its rows of `dx_TI` in place; return all parameters' gradients, in order."""
        ...


def kernel_for(spans: Sequence[LayerSpan], x_TI: Tensor) -> SpanKernel:
    """Return the executor for updates of rows like `x_TI`."""
    return GroupedLora() if x_TI.is_cuda and is_groupable(spans, x_TI) else SpanLoop()


class SpanLoop:
    """Executor that runs spans one by one, each on exactly its rows, so no reduction mixes rows of two spans."""

    def add_output(self, spans: Sequence[LayerSpan], x_TI: Tensor, y_TO: Tensor) -> list[Tensor]:
        """Add each span's update to its rows of `y_TO` in place; return the tensors that `add_gradient` needs."""
        saved: list[Tensor] = []
        for span in spans:
            rows = slice(span.begin_row, span.end_row)
            x_SI, y_SO = stable_rows(x_TI[rows]), stable_rows(y_TO[rows])
            saved += span.update.add_output(x_SI, y_SO, span.dropout)
            if not is_stable(y_TO[rows]):
                y_TO[rows] = y_SO[: span.end_row - span.begin_row]
        return saved

    def add_gradient(
        self, spans: Sequence[LayerSpan], x_TI: Tensor, dy_TO: Tensor, dx_TI: Tensor | None, saved: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Add each span's gradient to its rows of `dx_TI` in place; return all parameters' gradients, in order."""
        gradients: list[Tensor | None] = []
        remaining = iter(saved)
        for span in spans:
            rows = slice(span.begin_row, span.end_row)
            own = [next(remaining) for _ in range(span.update.saved_count)]
            x_SI, dy_SO = stable_rows(x_TI[rows]), stable_rows(dy_TO[rows])
            dx_SI = None if dx_TI is None else stable_rows(dx_TI[rows])
            gradients += span.update.add_gradient(x_SI, dy_SO, dx_SI, own, span.dropout)
            if dx_TI is not None and not is_stable(dx_TI[rows]):
                dx_TI[rows] = dx_SI[: span.end_row - span.begin_row]
        return gradients
