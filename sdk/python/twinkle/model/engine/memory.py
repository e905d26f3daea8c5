"""Out-of-memory errors: detection on any device, the error of a sharded pass, and the release of unused memory."""

import torch

_ALLOCATOR = 'DefaultCPUAllocator'
"""Name in the message of a CPU out-of-memory error, for which torch 2.13 has no class."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is a failed allocation, on any device, after which the process can continue."""
    if isinstance(error, OutOfMemoryInShardedPass):
        # The message may contain the allocator's message, but the process cannot continue, because other ranks may wait
        # for it.
        return False
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _ALLOCATOR in str(error)
    )


class OutOfMemoryInShardedPass(RuntimeError):
    """Memory ran out on a rank of a sharded model. Other ranks may wait for this rank, so the program must end."""


def release_memory(device: torch.device) -> None:
    """Return the allocator's unused blocks to the device."""
    if device.type == 'cuda':
        torch.cuda.empty_cache()
