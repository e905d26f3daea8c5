"""Memory of GPUs in bytes. This module does not import torch; callers pass `torch.cuda`."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol


class CudaMemory(Protocol):
    """Functions of `torch.cuda` that report memory."""

    def is_initialized(self) -> bool:
        """Return whether this process has used the GPU."""
        ...

    def memory_allocated(self, device: str) -> int:
        """Return the bytes of this process's tensors."""
        ...

    def memory_reserved(self, device: str) -> int:
        """Return the bytes that this process's allocator holds, including memory reserved for later tensors."""
        ...

    def mem_get_info(self, device: str) -> tuple[int, int]:
        """Return the free bytes of the GPU and its total bytes."""
        ...


def gpu_memory(cuda: CudaMemory, device: str) -> dict[str, int]:
    """Return the memory of a GPU that is allocated and reserved in this process, used by all processes, and total.

    The result is empty for a CPU, and before this process uses the GPU, because a query would allocate memory.
    """
    if not device.startswith('cuda') or not cuda.is_initialized():
        return {}
    free, total = cuda.mem_get_info(device)
    return {
        'allocated': cuda.memory_allocated(device),
        'reserved': cuda.memory_reserved(device),
        'used': total - free,
        'total': total,
    }


def summed(memories: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the memory of several GPUs together."""
    total = Counter[str]()
    for memory in memories:
        total.update(memory)
    return dict(total)
