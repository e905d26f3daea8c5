"""Detection of out-of-memory errors among the RuntimeErrors of torch."""

import torch

_ALLOCATOR = 'DefaultCPUAllocator'
"""Name in the message of a CPU out-of-memory error, for which torch 2.13 has no class."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on any device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _ALLOCATOR in str(error)
    )


class OutOfMemoryInShardedPass(RuntimeError):
    """Memory ran out on a rank of a sharded model. The other ranks wait for it in the pass, so the program must end."""


def release_memory(device: torch.device) -> None:
    """Return the allocator's unused blocks to the device."""
    if device.type == 'cuda':
        torch.cuda.empty_cache()
