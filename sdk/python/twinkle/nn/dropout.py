"""Reproducible dropout: recomputed layers and the backward pass use the masks of the forward pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

_SEED_LIMIT = 2**62
"""Exclusive limit of the seed of a pass."""
_LAYER_STRIDE = 1_000_003
"""Distance between the seeds of two layers; any odd number above the number of layers works."""


@dataclass(frozen=True)
class RowDropout:
    """Dropout of one adapter in one pass; each layer's mask is a function of the seed and the layer's index."""

    probability: float
    seed: int

    @classmethod
    def sample(cls, probability: float, generator: torch.Generator) -> 'RowDropout':
        """Sample the seed of a pass, which advances the adapter's generator once."""
        seed = torch.randint(_SEED_LIMIT, (), generator=generator, dtype=torch.int64)
        return cls(probability, int(seed))

    def of_half(self, index: int) -> 'RowDropout':
        """Return the dropout of the first (0) or second (1) half of the rows, when each half runs in a separate pass.

        No seed is sampled, so dividing a pass does not change the dropout of later passes.
        """
        return RowDropout(self.probability, (2 * self.seed + 1 + index) % _SEED_LIMIT)

    def mask(self, x: Tensor, *, layer: int) -> Tensor:
        """Return the factors for `x`: 0 or `1 / (1 - probability)`. Every call returns the same mask."""
        generator = torch.Generator(device=x.device).manual_seed(self.seed + layer * _LAYER_STRIDE)
        uniform = torch.rand(x.shape, generator=generator, device=x.device)
        return (uniform >= self.probability).to(x.dtype).div_(1.0 - self.probability)
