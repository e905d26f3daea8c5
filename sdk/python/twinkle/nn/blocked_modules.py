"""Linear products of modules that are not linear layers, such as the routers of mixtures of experts."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from twinkle.nn.experts import PackedExperts
from twinkle.nn.lora_linear import AdaptedLinear
from twinkle.nn.row_products import needs_blocks


class _BlockedLinear(TorchFunctionMode):
    """Replaces calls of `torch.nn.functional.linear` by products whose rows are independent."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is linear and needs_blocks(args[0]):
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def divide_products(text: nn.Module) -> None:
    """Divide the products of modules with matrix parameters where rows of a product would depend on the other rows.

    Linear layers, embeddings and packed experts need no change.
    """
    for module in text.modules():
        matrices = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 2]
        if any(map(needs_blocks, matrices)) and not isinstance(module, nn.Linear | nn.Embedding | PackedExperts):
            module.forward = _divided(module.forward)


def _divided(forward: Callable[..., Any]) -> Callable[..., Any]:
    def divided(*args: Any, **kwargs: Any) -> Any:
        with _BlockedLinear():
            return forward(*args, **kwargs)

    return divided


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y_TO: Tensor = AdaptedLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias, ())
    return y_TO.view(*x.shape[:-1], -1)
