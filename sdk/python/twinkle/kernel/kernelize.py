"""Kernels into a model, and out of it again."""

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
from twinkle.nn import KernelSeam

Choice = str | KernelChoice | Kernel


@dataclass(frozen=True)
class _Planned:
    """A kernel that was found for an operation."""

    operation: str
    name: str
    kernel: Kernel | None
    seams: Sequence[KernelSeam]


def kernelize(model: Any, mapping: Mapping[str, Choice] = DEFAULT_KERNEL_CONFIG) -> Any:
    """Choose the kernels of a model's operations; all of them or, when it raises, none. Return the model.

    Call it while no pass of the model runs. What `mapping` does not name stays as it is.

    Args:
        model: a trainer of `twinkle.model`, a `PackedCausalLM`, or a module with layers of `twinkle.nn`.
        mapping: for each operation of `OPERATIONS` a backend of `BACKENDS`, a `KernelChoice`, or a function of the
            operation's arguments (see `KernelSeam.operation`) that autograd can go through.

    Raises:
        KernelError: an operation or backend is unknown, the model has no such operation, or the backend cannot
            run on its device.
    """
    seams = _seams(model)
    plan = [_planned(operation, choice, seams) for operation, choice in mapping.items()]
    if mapping is DEFAULT_KERNEL_CONFIG:
        # The defaults are for any model; what it does not have is no mistake then.
        plan = [planned for planned in plan if planned.seams]
    for planned in plan:
        if not planned.seams:
            present = sorted({seam.operation for seam in seams})
            raise KernelError(planned.operation, f'the model has no such operation; it has {present}')
    for planned in plan:
        for seam in planned.seams:
            seam.kernel = planned.kernel
        get_logger().info('%s: %d layers run on %s', planned.operation, len(planned.seams), planned.name)
    return model


def unkernelize(model: Any) -> Any:
    """Let every operation of a model run its reference again, to the bit; return the model."""
    for seam in _seams(model):
        seam.kernel = None
    return model


@contextmanager
def kernelized(model: Any, mapping: Mapping[str, Choice] = DEFAULT_KERNEL_CONFIG) -> Generator[Any]:
    """Have kernels in a model until the block ends, then those that were there before; raises as `kernelize`."""
    before = [(seam, seam.kernel) for seam in _seams(model)]
    kernelize(model, mapping)
    try:
        yield model
    finally:
        for seam, kernel in before:
            seam.kernel = kernel


def kernels_of(model: Any) -> dict[str, Kernel | None]:
    """Return what runs each operation of a model; None is the reference."""
    return {seam.operation: seam.kernel for seam in _seams(model)}


def _seams(model: Any) -> list[KernelSeam]:
    if isinstance(model, nn.Module):
        return [module for module in model.modules() if isinstance(module, KernelSeam)]
    # A trainer holds an engine, and that the packed model.
    held = getattr(getattr(model, 'engine', None), 'model', model)
    seams = getattr(held, 'seams', None)
    if not isinstance(seams, list):
        raise KernelError('kernelize', f'{type(model).__name__} is no trainer, packed model or module')
    return seams


def _planned(operation: str, choice: Choice, seams: Sequence[KernelSeam]) -> _Planned:
    if operation not in OPERATIONS:
        raise KernelError(operation, f'is none of the operations that can be given a kernel: {", ".join(OPERATIONS)}')
    own = [seam for seam in seams if seam.operation == operation]
    if isinstance(choice, nn.Module):
        # A module within a layer would be a part of the frozen model, and torch would hide it behind `kernel`.
        raise KernelError(operation, f'{type(choice).__name__} is a module; give a function without weights of its own')
    if callable(choice):
        return _Planned(operation, getattr(choice, '__name__', repr(choice)), choice, own)
    wanted = choice.backends if isinstance(choice, KernelChoice) else (choice,)
    refused: list[str] = []
    for backend in wanted:
        problem = _problem(backend, own)
        if problem is None:
            because = f' ({"; ".join(refused)})' if refused else ''
            return _Planned(operation, backend + because, _load(backend, operation), own)
        refused.append(f'{backend} {problem}')
    raise KernelError(operation, '; '.join(refused))


def _problem(backend: str, seams: Sequence[KernelSeam]) -> str | None:
    """Say why a backend cannot run these layers; None where it can."""
    if backend not in BACKENDS:
        return f'is no backend: there are {", ".join(BACKENDS)}, or give a function'
    if backend == 'torch':
        return None
    if importlib.util.find_spec('liger_kernel') is None:
        return "is not installed: pip install 'twinkle-grpc[liger]' on Linux with an NVIDIA GPU"
    devices = {parameter.device.type for seam in seams for parameter in seam.parameters()}
    if devices - {'cuda'} or not torch.cuda.is_available():
        return f'runs on cuda only, and the model is on {", ".join(sorted(devices)) or "no device"}'
    return None


def _load(backend: str, operation: str) -> Kernel | None:
    # By name, because the module imports a library that most machines do not have.
    return None if backend == 'torch' else getattr(importlib.import_module(f'twinkle.kernel.{backend}'), operation)
