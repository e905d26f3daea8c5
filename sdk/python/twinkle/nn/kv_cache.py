"""Keys and values of one sequence's past tokens."""

import torch
from torch import Tensor

from twinkle.nn.errors import PackError

_FIRST_CAPACITY = 64


class KVCache:
    """Keys and values of one sequence per layer, `[n_kv_heads, length, head_dim]`, grown by doubling.

    Tensors are written in place, so it must not be used under autograd.

    Args:
        max_length: maximum number of tokens, which also bounds the memory; None is unbounded.
    """

    def __init__(self, max_length: int | None = None) -> None:
        self._max_length = max_length
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._lengths: list[int] = []

    @property
    def length(self) -> int:
        """Number of stored tokens; it is the same for every layer between forward passes."""
        return self._lengths[-1] if self._lengths else 0

    @property
    def size_bytes(self) -> int:
        """Allocated memory, in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self._keys, *self._values))

    def layer_length(self, layer: int) -> int:
        """Return the number of tokens stored for one layer."""
        return self._lengths[layer] if layer < len(self._lengths) else 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens to a layer.

        Args:
            layer: layer index; the first appends must come in layer order.
            keys: [n_kv_heads, new tokens, head_dim].
            values: [n_kv_heads, new tokens, head_dim].

        Returns:
            All keys and values of the layer, as views that the next append may invalidate.

        Raises:
            PackError: the layer would have more than `max_length` tokens.
        """
        if layer == len(self._lengths):
            capacity = min(_FIRST_CAPACITY, self._max_length or _FIRST_CAPACITY)
            self._keys.append(_allocate(keys, capacity))
            self._values.append(_allocate(values, capacity))
            self._lengths.append(0)
        begin = self._lengths[layer]
        end = begin + keys.shape[1]
        for store, new in ((self._keys, keys), (self._values, values)):
            if end > store[layer].shape[1]:
                store[layer] = _grown(store[layer], begin, self._capacity_for(end))
            store[layer][:, begin:end] = new
        self._lengths[layer] = end
        return self._keys[layer][:, :end], self._values[layer][:, :end]

    def _capacity_for(self, length: int) -> int:
        """Return the capacity, in tokens, to allocate for `length` tokens."""
        capacity = _FIRST_CAPACITY
        while capacity < length:
            capacity *= 2
        if self._max_length is None:
            return capacity
        if length > self._max_length:
            raise PackError(f'{length} tokens do not fit a cache of {self._max_length} tokens')
        return min(capacity, self._max_length)

    def truncate(self, length: int) -> None:
        """Discard all tokens from index `length` on."""
        self._lengths = [min(length, stored) for stored in self._lengths]

    def copy(self) -> 'KVCache':
        """Return an independent copy, for example for another sample of the same prompt."""
        duplicate = KVCache(self._max_length)
        duplicate._keys = [tensor.clone() for tensor in self._keys]
        duplicate._values = [tensor.clone() for tensor in self._values]
        duplicate._lengths = list(self._lengths)
        return duplicate


def _allocate(like: Tensor, capacity: int) -> Tensor:
    heads, _, head_dim = like.shape
    return torch.empty((heads, capacity, head_dim), dtype=like.dtype, device=like.device)


def _grown(tensor: Tensor, length: int, capacity: int) -> Tensor:
    grown = _allocate(tensor, capacity)
    grown[:, :length] = tensor[:, :length]
    return grown
