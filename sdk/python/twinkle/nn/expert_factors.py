"""Low-rank updates of all experts of a mixture, in the layout in which peft stores them.

Legend: E experts, O outputs and I inputs of an expert, r (in names R) LoRA rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle.nn.lora_factors import LoraFactors


@dataclass(frozen=True)
class ExpertFactors:
    """`y += scaling B[e] A[e] x` for the rows of expert e."""

    a: Tensor
    """float32 [E r, I]; the rows of an expert are consecutive."""
    b: Tensor
    """float32 [O, r E]; column `k E + e` is column k of expert e."""
    scaling: float
    expert_count: int

    def parameters(self) -> tuple[Tensor, Tensor]:
        """Return A and B."""
        return self.a, self.b

    def by_expert(self) -> list[LoraFactors]:
        """Return the factors of each expert; autograd adds their gradients to the gradients of `a` and `b`."""
        a_ERI = self.a.unflatten(0, (self.expert_count, -1))
        # The copy gives all factors of an expert consecutive addresses, which products need.
        b_EOR = self.b.unflatten(1, (-1, self.expert_count)).permute(2, 0, 1).contiguous()
        return [LoraFactors(a, b, self.scaling) for a, b in zip(a_ERI.unbind(), b_EOR.unbind(), strict=True)]

    def delta(self) -> Tensor:
        """Return float32 [E, O, I], the change of the stacked weights."""
        return torch.stack([factors.delta() for factors in self.by_expert()])
