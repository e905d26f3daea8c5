"""Temporary conversion of a half-precision model to float32, one layer at a time.

The check of a loaded model (`twinkle.nn.probe`) uses float32, because rounding in half precision hides small errors.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_HALF = (torch.bfloat16, torch.float16)
"""Dtypes that are converted."""


@contextmanager
def float32_weights(model: nn.Module) -> Iterator[None]:
    """Let a half-precision model compute in float32 within the block, without gradients.

    Each layer is converted for the duration of its forward pass, so the block needs additional memory for one layer and
    for the weights outside of layers. Parameters stay the same objects, and their values are bitwise restored.
    """
    layers = _layers(model)
    within = {id(tensor) for layer in layers for tensor in _tensors(layer)}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_converted(tensor for tensor in _tensors(model) if id(tensor) not in within))
        for layer in layers:
            stack.enter_context(_converting(layer))
        yield


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the elements of all module lists, without elements inside other elements."""
    elements = [child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module]
    inner = {module for element in elements for module in element.modules() if module is not element}
    return [element for element in dict.fromkeys(elements) if element not in inner]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.dtype in _HALF]


@contextmanager
def _converted(tensors: Iterable[Tensor]) -> Iterator[None]:
    originals = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor, data in originals:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in originals:
            tensor.data = data


@contextmanager
def _converting(layer: nn.Module) -> Iterator[None]:
    """Convert a layer during each of its forward passes within the block."""
    running = ExitStack()

    def convert(module: nn.Module, arguments: object) -> None:
        del arguments
        running.enter_context(_converted(_tensors(module)))

    def restore(module: nn.Module, arguments: object, output: Any) -> None:
        del module, arguments, output
        running.close()

    handles = [
        layer.register_forward_pre_hook(convert),
        layer.register_forward_hook(restore, always_call=True),
    ]
    try:
        yield
    finally:
        running.close()
        for handle in handles:
            handle.remove()
