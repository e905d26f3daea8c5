"""Scalar value head of an adapter whose loss needs values."""

import torch
from torch import Tensor
from torch.nn.functional import linear


class ValueHead:
    """`v = w h + b` of each row's hidden state, in float32; initialized to zero, so it needs no seed.

    Args:
        hidden_size: size D of the hidden states.
        device: device of the weights.
    """

    def __init__(self, hidden_size: int, *, device: torch.device) -> None:
        self.weight_1D = torch.zeros(1, hidden_size, device=device, requires_grad=True)
        self.bias_1 = torch.zeros(1, device=device, requires_grad=True)

    def __call__(self, hidden_RD: Tensor) -> Tensor:
        """Return float32 [R], the value of each row."""
        return linear(hidden_RD.float(), self.weight_1D, self.bias_1)[:, 0]

    def named_parameters(self) -> dict[str, Tensor]:
        """Return the trainable tensors, in a fixed order."""
        return {'value_head.weight': self.weight_1D, 'value_head.bias': self.bias_1}
