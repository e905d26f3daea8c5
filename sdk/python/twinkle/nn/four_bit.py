"""Frozen linear layers whose weights are stored in four bits, with the optional library bitsandbytes.

The weights are rounded to NF4, with one scale per 64 elements (QLoRA, Dettmers et al. 2023, arXiv:2305.14314, section
3). A pass restores the weights of one layer at a time and computes ordinary products with them, so the rows of a
product are as independent as those of other layers.

Legend: I inputs and O outputs of a layer.
"""

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from twinkle.nn.errors import UnsupportedModel

NF4 = 'nf4'
"""Name of the format."""
_NOT_INSTALLED = "quantization 'nf4' needs bitsandbytes, which is not installed; run pip install 'twinkle-grpc[nf4]'"


class FourBitWeight:
    """A matrix in NF4.

    Args:
        weight_OI: the matrix, in the type in which it is restored.

    Raises:
        ImportError: bitsandbytes is not installed.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        self._library = _library()
        self._packed, self._scales = self._library.quantize_4bit(weight_OI, quant_type=NF4, compress_statistics=False)

    @property
    def byte_count(self) -> int:
        """Memory of the matrix in bytes."""
        return self._packed.nbytes + self._scales.absmax.nbytes

    def restored(self) -> Tensor:
        """Return the rounded matrix [O, I] as a new tensor."""
        return self._library.dequantize_4bit(self._packed, self._scales)


class FourBitLinear(nn.Linear):
    """A frozen linear layer with a weight in NF4. It has no parameter `weight`, only a property that restores it.

    Args:
        layer: layer whose weight is rounded; its bias is shared.

    Raises:
        ImportError: bitsandbytes is not installed.
    """

    def __init__(self, layer: nn.Linear) -> None:
        # The constructor of nn.Linear is not called, because it would create a weight.
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.packed = FourBitWeight(layer.weight.detach())
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride] (a parameter in nn.Linear)
        """The restored weight [O, I], a new tensor at each access."""
        return self.packed.restored()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name in nn.Linear)
        """Return `y [..., O]` for `x [..., I]`."""
        return linear(input, self.weight, self.bias)


def quantize(model: PreTrainedModel, device: torch.device) -> None:
    """Replace the linear layers of the model by layers with weights in NF4 on a device, in place.

    The embedding, the output head and packed experts keep their weights.

    Raises:
        UnsupportedModel: bitsandbytes is not installed, or the model has no linear layer.
    """
    layers = [
        (parent, name, child)
        for parent in model.base_model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    if not layers:
        raise UnsupportedModel('it has no linear layer whose weights can be quantized; leave quantization out')
    try:
        for parent, name, layer in layers:
            # One layer at a time is on the device with its original weight.
            setattr(parent, name, FourBitLinear(layer.to(device)))
    except ImportError:
        raise UnsupportedModel(_NOT_INSTALLED) from None


def quantized_count(model: nn.Module) -> int:
    """Return the number of weights in NF4, which are not parameters."""
    layers = (module for module in model.modules() if isinstance(module, FourBitLinear))
    return sum(layer.in_features * layer.out_features for layer in layers)


def _library() -> Any:
    return importlib.import_module('bitsandbytes.functional')
