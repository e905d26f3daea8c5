"""Telling that memory ran out from all else that torch raises as RuntimeError."""

import torch

_ALLOCATOR = 'DefaultCPUAllocator'
"""On the CPU there is no class for it: a RuntimeError with this name in its message (torch 2.13)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _ALLOCATOR in str(error)
    )


def release_memory(device: torch.device) -> None:
    """Give the allocator's unused blocks back, so that smaller ones find room."""
    if device.type == 'cuda':
        torch.cuda.empty_cache()
