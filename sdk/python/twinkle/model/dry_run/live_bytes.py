"""Peak memory of the tensors allocated in a block."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes:
    """Result of `peak_bytes`; 0 until the block ends."""

    def __init__(self) -> None:
        self.value = 0
        """Peak in bytes above the level at the start of the block."""


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[PeakBytes]:
    """Measure the peak memory of a block, from CUDA's statistics or by tracking every new tensor."""
    result = PeakBytes()
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield result
        result.value = torch.cuda.max_memory_allocated(device) - before
        return
    with _LiveStorages() as storages:
        yield result
    result.value = storages.peak


class _LiveStorages(TorchDispatchMode):
    """Tracks the bytes of storages from the operation that creates them until they are freed.

    A storage with several views is counted once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in known:
                self._add(leaf)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._live += storage.nbytes()
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._live -= self._sizes.pop(key, 0)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # noqa: SLF001 - the only identity that is stable for a storage's lifetime
