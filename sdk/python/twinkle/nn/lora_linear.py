"""A frozen linear layer to which each adapter adds its update on its own rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from twinkle.nn.errors import UnsupportedModel
from twinkle.nn.rows import MIN_ROWS, pad_rows
from twinkle.nn.spans import AdapterSpan


@dataclass
class ActiveAdapters:
    """Which adapters the pass that is running uses; one object shared by all layers of a model.

    Linear layers are called by the model's own code with nothing but their input, so this is how
    the spans reach them. Concurrency: one forward pass at a time for each model.
    """

    spans: Sequence[AdapterSpan] = ()
    row_count: int = 0
    is_training: bool = False
    _is_busy: bool = field(default=False, repr=False)

    @contextmanager
    def during(self, spans: Sequence[AdapterSpan], *, row_count: int, is_training: bool) -> Iterator[None]:
        """Use `spans` until the block ends.

        Raises:
            RuntimeError: another pass of the same model is running.
        """
        if self._is_busy:
            raise RuntimeError('a forward pass of this model is running; drive a model from one thread')
        self._is_busy = True
        self.spans = [span for span in spans if span.adapter is not None]
        self.row_count, self.is_training = row_count, is_training
        try:
            yield
        finally:
            self._is_busy = False
            self.spans, self.row_count, self.is_training = (), 0, False


class LoraLinear(nn.Module):
    """`y[t] = W x[t] + scaling B A dropout(x[t])`, with A, B and scaling of the adapter of row t."""

    def __init__(self, base: nn.Linear, *, path: str, active: ActiveAdapters) -> None:
        super().__init__()
        self.base = base
        self._path = path
        self._active = active

    @property
    def weight(self) -> Tensor:
        """The frozen weight; some models read it to learn a device or dtype."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return `y [..., out]` for `x [..., in]`, whose leading axes are the rows of the pack."""
        y = self.base(x)
        if not any(self._path in span.adapter.factors for span in self._active.spans):
            return y
        x_TI, y_TO = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        if x_TI.shape[0] != self._active.row_count:
            raise UnsupportedModel(f'{self._path} sees {x_TI.shape[0]} of {self._active.row_count} rows')
        return self._adapted(x_TI, y_TO).reshape(y.shape)

    def _adapted(self, x_TI: Tensor, y_TO: Tensor) -> Tensor:
        pieces: list[Tensor] = []
        row = 0
        for span in self._active.spans:
            factors = span.adapter.factors.get(self._path)
            if factors is None:
                continue
            if span.begin_row > row:
                pieces.append(y_TO[row : span.begin_row])
            rows = slice(span.begin_row, span.end_row)
            x = x_TI[rows]
            if self._active.is_training:
                x = span.adapter.dropout(x)
            padded = pad_rows(x.to(factors.a.dtype), MIN_ROWS)
            update = nn.functional.linear(nn.functional.linear(padded, factors.a), factors.b)[: x.shape[0]]
            pieces.append(y_TO[rows] + (factors.scaling * update).to(y_TO.dtype))
            row = span.end_row
        if row < y_TO.shape[0]:
            pieces.append(y_TO[row:])
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
