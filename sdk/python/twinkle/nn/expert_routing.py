"""Recording and replay of the experts that the routers of a mixture choose (routing replay).

A sampler and a trainer round differently, so their routers may choose different experts for the same token, and policy
ratios then compare different experts. With replay, the trainer's pass uses the sampler's experts (Zheng et al. 2025,
arXiv:2507.18071, section 5.3; Ma et al. 2025, arXiv:2510.11370). Only the choice is replayed: the weights of the given
experts are computed from the router's current logits, and gradients flow through them.

Legend: T rows of the pack, L layers with experts, A experts per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle.nn.errors import PackError

FREE = -1
"""Expert index that leaves the choice to the router."""


@dataclass(frozen=True)
class RoutingShape:
    """Sizes of the routing of a model."""

    layer_count: int
    """L: number of layers with experts."""
    choice_count: int
    """A: number of experts per token."""
    expert_count: int
    """E: number of experts of a layer."""

    @property
    def token_bytes(self) -> int:
        """Size in bytes of the experts of one token."""
        return self.layer_count * self.choice_count * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """uint8 if it can represent all expert indexes, else int32; messages do not support 16-bit integers."""
        return torch.uint8 if self.expert_count <= 1 << 8 else torch.int32


class ExpertRouting:
    """Experts of the rows of one pass.

    Args:
        shape: sizes of the model's routing.
        given_TLA: int [T, L, A], experts that replace the routers' choice; `FREE` in rows whose experts the routers
            choose. None: the routers choose all experts.

    Raises:
        PackError: the shape does not fit, or an index is out of range.
    """

    def __init__(self, shape: RoutingShape, given_TLA: Tensor | None = None) -> None:
        if given_TLA is not None:
            wanted = (shape.layer_count, shape.choice_count)
            if given_TLA.dim() != 3 or given_TLA.shape[1:] != wanted:
                raise PackError(f'experts must have shape [T, {wanted[0]}, {wanted[1]}], got {list(given_TLA.shape)}')
            if bool(((given_TLA < FREE) | (given_TLA >= shape.expert_count)).any()):
                raise PackError(f'experts must be from 0 to {shape.expert_count - 1}, or {FREE} for a free choice')
        self.shape = shape
        self._given_TLA = given_TLA
        self._chosen: dict[int, Tensor] = {}

    @property
    def is_replayed(self) -> bool:
        """Whether experts are given."""
        return self._given_TLA is not None

    def choose(self, layer: int, index_TA: Tensor) -> Tensor:
        """Return the experts of a layer for the rows of the pass, padding included, and record them.

        Args:
            layer: index among the layers with experts.
            index_TA: int64 [T, A], choice of the router.
        """
        if self._given_TLA is not None:
            given_TA = self._given_TLA[:, layer].to(index_TA.dtype)
            padding = index_TA.new_full((len(index_TA) - len(given_TA), self.shape.choice_count), FREE)
            given_TA = torch.cat([given_TA, padding])
            index_TA = torch.where(given_TA == FREE, index_TA, given_TA)
        self._chosen[layer] = index_TA.detach()
        return index_TA

    def chosen(self, row_count: int) -> Tensor:
        """Return [T, L, A] in `RoutingShape.dtype`: the experts of the first rows of the finished pass."""
        layers = [self._chosen[layer][:row_count] for layer in range(self.shape.layer_count)]
        return torch.stack(layers, dim=1).to(self.shape.dtype)
