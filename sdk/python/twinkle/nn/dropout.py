"""Dropout whose draws can be made again: by the recomputation of a checkpointed layer, and by the backward pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

_SEED_LIMIT = 2**62
_LAYER_STRIDE = 1_000_003
"""Distance between the seeds of two layers; any odd number above the number of layers would do."""


@dataclass(frozen=True)
class RowDropout:
    """One adapter's dropout in one pass: the mask of each layer follows from the seed and the layer's number."""

    probability: float
    seed: int

    @classmethod
    def draw(cls, probability: float, generator: torch.Generator) -> 'RowDropout':
        """Draw the seed of a pass; this is all that a pass takes from the adapter's generator."""
        seed = torch.randint(_SEED_LIMIT, (), generator=generator, dtype=torch.int64)
        return cls(probability, int(seed))

    def mask(self, x: Tensor, *, layer: int) -> Tensor:
        """Return what to multiply `x` with: 0, or `1 / (1 - probability)`. The same on every call."""
        generator = torch.Generator(device=x.device).manual_seed(self.seed + layer * _LAYER_STRIDE)
        draws = torch.rand(x.shape, generator=generator, device=x.device)
        return (draws >= self.probability).to(x.dtype).div_(1.0 - self.probability)
