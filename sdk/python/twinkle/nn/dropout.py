"""Reproducible dropout: recomputed layers and the backward pass use the masks of the forward pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle.nn.rows import MIN_ROWS, pad_rows

_SEED_LIMIT = 2**62
"""Exclusive limit of the seed of a pass."""
_LAYER_STRIDE = 1_000_003
"""Difference between the seeds of consecutive layers, large enough that all layers of a pass have different seeds."""


@dataclass(frozen=True)
class RowDropout:
    """Dropout of one adapter in one pass; each layer's mask is a function of the seed and the layer's index."""

    probability: float
    seed: int
    part: tuple[int, int, int] | None = None
    """Begin and end of the rows of this rank, and the number of all rows; None if this rank has all rows."""

    @classmethod
    def sample(cls, probability: float, generator: torch.Generator) -> 'RowDropout':
        """Sample the seed of a pass. This advances the adapter's generator once."""
        seed = torch.randint(_SEED_LIMIT, (), generator=generator, dtype=torch.int64)
        return cls(probability, int(seed))

    def of_half(self, index: int) -> 'RowDropout':
        """Return the dropout of the first (0) or second (1) half of the rows, when each half runs in a separate pass.

        No seed is sampled, so dividing a pass does not change the dropout of later passes.
        """
        return RowDropout(self.probability, (2 * self.seed + 1 + index) % _SEED_LIMIT)

    def of_rows(self, begin: int, end: int, *, row_count: int) -> 'RowDropout':
        """Return the dropout of rows `[begin, end)` of the adapter's `row_count` rows, if other ranks have the rest."""
        return RowDropout(self.probability, self.seed, (begin, end, row_count))

    def mask(self, x: Tensor, *, layer: int) -> Tensor:
        """Return the factors for `x`: 0 or `1 / (1 - probability)`. Every call returns the same mask.

        If this rank has only a part of the rows, the call needs temporary memory for the random numbers of all rows.
        """
        generator = torch.Generator(device=x.device).manual_seed(self.seed + layer * _LAYER_STRIDE)
        if self.part is None:
            uniform = torch.rand(x.shape, generator=generator, device=x.device)
        else:
            begin, end, row_count = self.part
            # Layers pad a short input to `MIN_ROWS` rows, and a rank with all rows samples numbers for the padding too.
            shape = (max(row_count, MIN_ROWS), *x.shape[1:])
            uniform = torch.rand(shape, generator=generator, device=x.device)[begin:end]
            uniform = pad_rows(uniform, x.shape[0])
        return (uniform >= self.probability).to(x.dtype).div_(1.0 - self.probability)
