"""Installation of kernels in a model, and their removal."""

import importlib
import importlib.util
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from twinkle.infra import get_logger
from twinkle.kernel.choice import BACKENDS, DEFAULT_KERNEL_CONFIG, OPERATIONS, Kernel, KernelChoice
from twinkle.kernel.errors import KernelError
from twinkle.nn import KernelLayer

Choice = str | KernelChoice | Kernel


@dataclass(frozen=True)
class _Selection:
    """Kernel selected for an operation."""

    operation: str
    name: str
    kernel: Kernel | None
    layers: Sequence[KernelLayer]


def kernelize(model: Any, mapping: Mapping[str, Choice] = DEFAULT_KERNEL_CONFIG) -> Any:
    """Set the kernels of a model's operations and return the model; after an error, no kernel was changed.

    No pass of the model may be running. Operations that `mapping` does not name keep their kernels.

    Args:
        model: trainer of `twinkle.model`, `PackedModel`, or a module with layers of `twinkle.nn`.
        mapping: for each operation of `OPERATIONS` a backend of `BACKENDS`, a `KernelChoice`, or a function of the
            operation's arguments (see `KernelLayer.operation`) that autograd can differentiate.

    Raises:
        KernelError: `model` has an unsupported type or does not have the operation; an operation or backend is unknown;
            a kernel is a torch module; or the backend is not installed or does not run on the model's device.
    """
    layers = _kernel_layers(model)
    plan = [_selection(operation, choice, layers) for operation, choice in mapping.items()]
    if mapping is DEFAULT_KERNEL_CONFIG:
        # The defaults cover every operation, so a model without some of these operations is valid.
        plan = [selection for selection in plan if selection.layers]
    for selection in plan:
        if not selection.layers:
            present = sorted({layer.operation for layer in layers})
            raise KernelError(selection.operation, f'the model has no such operation; it has {present}')
    for selection in plan:
        for layer in selection.layers:
            layer.kernel = selection.kernel
        get_logger().info(
            'kernel selected operation=%s layers=%d kernel=%s',
            selection.operation,
            len(selection.layers),
            selection.name,
        )
    return model


def unkernelize(model: Any) -> Any:
    """Set every operation of a model back to its reference and return the model.

    Raises:
        KernelError: `model` is not of a type that `kernelize` accepts.
    """
    for layer in _kernel_layers(model):
        layer.kernel = None
    return model


@contextmanager
def kernelized(model: Any, mapping: Mapping[str, Choice] = DEFAULT_KERNEL_CONFIG) -> Generator[Any]:
    """Install kernels inside the context, then restore the previous kernels; for errors see `kernelize`."""
    before = [(layer, layer.kernel) for layer in _kernel_layers(model)]
    kernelize(model, mapping)
    try:
        yield model
    finally:
        for layer, kernel in before:
            layer.kernel = kernel


def kernels_of(model: Any) -> dict[str, Kernel | None]:
    """Return the kernel of each operation of a model; None is the reference. For errors see `unkernelize`."""
    return {layer.operation: layer.kernel for layer in _kernel_layers(model)}


def _kernel_layers(model: Any) -> list[KernelLayer]:
    if isinstance(model, nn.Module):
        return [module for module in model.modules() if isinstance(module, KernelLayer)]
    # A trainer has an engine, and the engine has the packed model.
    packed = getattr(getattr(model, 'engine', None), 'model', model)
    layers = getattr(packed, 'kernel_layers', None)
    if not isinstance(layers, list):
        raise KernelError('kernelize', f'{type(model).__name__} is not a trainer, packed model or module')
    return layers


def _selection(operation: str, choice: Choice, layers: Sequence[KernelLayer]) -> _Selection:
    if operation not in OPERATIONS:
        raise KernelError(operation, f'unknown operation; kernels can be set for {", ".join(OPERATIONS)}')
    own = [layer for layer in layers if layer.operation == operation]
    if isinstance(choice, nn.Module):
        # As an attribute, a module would become part of the frozen model, and torch would shadow `kernel`.
        raise KernelError(operation, f'{type(choice).__name__} is a module; give a function without weights')
    if callable(choice):
        return _Selection(operation, getattr(choice, '__name__', repr(choice)), choice, own)
    wanted = choice.backends if isinstance(choice, KernelChoice) else (choice,)
    refused: list[str] = []
    for backend in wanted:
        problem = _problem(backend, own)
        if problem is None:
            reason = f' ({"; ".join(refused)})' if refused else ''
            return _Selection(operation, backend + reason, _load(backend, operation), own)
        refused.append(f'{backend} {problem}')
    raise KernelError(operation, '; '.join(refused))


def _problem(backend: str, layers: Sequence[KernelLayer]) -> str | None:
    """Return the reason why a backend cannot run these layers, or None if it can."""
    if backend not in BACKENDS:
        return f'is not a backend; use one of {", ".join(BACKENDS)} or give a function'
    if backend == 'torch':
        return None
    if importlib.util.find_spec('liger_kernel') is None:
        return "is not installed: pip install 'twinkle-grpc[liger]' on Linux with an NVIDIA GPU"
    devices = {parameter.device.type for layer in layers for parameter in layer.parameters()}
    if devices - {'cuda'} or not torch.cuda.is_available():
        return f'runs only on cuda, and the model is on {", ".join(sorted(devices)) or "no device"}'
    return None


def _load(backend: str, operation: str) -> Kernel | None:
    # The module is imported by name, because most machines do not have Liger.
    return None if backend == 'torch' else getattr(importlib.import_module(f'twinkle.kernel.{backend}'), operation)
