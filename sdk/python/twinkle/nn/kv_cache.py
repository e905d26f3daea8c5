"""State of one sequence's past tokens: keys and values of attention, and the state of recurrent layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle.nn.errors import PackError

_FIRST_CAPACITY = 64
"""Initial capacity of a layer, in tokens."""


@dataclass(frozen=True)
class CacheSize:
    """Memory of the `KVCache` of one sequence."""

    bytes_per_token: int
    """Bytes of keys and values of each token; 0 for a model without attention."""
    bytes_per_sequence: int
    """Bytes of the state of recurrent layers, which does not grow."""

    def of(self, tokens: int) -> int:
        """Return the bytes of a sequence of some length."""
        return self.bytes_per_sequence + tokens * self.bytes_per_token

    def longest(self, memory_bytes: int, *, limit: int) -> int:
        """Return the length of the longest sequence that fits in `memory_bytes`, at most `limit` tokens."""
        available = memory_bytes - self.bytes_per_sequence
        if available < 0 or self.bytes_per_token == 0:
            return 0 if available < 0 else limit
        return min(limit, available // self.bytes_per_token)


@dataclass(frozen=True)
class RecurrentState:
    """State of one Gated DeltaNet layer after the tokens of a sequence so far; the legend is in `delta_net`."""

    length: int
    """Number of tokens so far."""

    inputs_CW: Tensor
    """Last W - 1 inputs of the convolution, [C, W - 1]."""
    memory_VKH: Tensor
    """Associative memory, float32 [V, K, H]."""


class KVCache:
    """Keys and values of one sequence at every layer, and the state of its recurrent layers.

    Keys and values are `[n_kv_heads, length, head_dim]`, and their capacity doubles when it is exceeded. They are
    written in place, so a cache must not be used under autograd.

    Args:
        max_length: maximum number of tokens, which also bounds the memory; None is unbounded.
    """

    def __init__(self, max_length: int | None = None) -> None:
        self._max_length = max_length
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._lengths: dict[int, int] = {}
        self.recurrent: dict[int, RecurrentState] = {}
        """State of each recurrent layer. A layer replaces its state, and never changes it in place."""

    @property
    def length(self) -> int:
        """Number of stored tokens; it is the same for every layer between forward passes."""
        lengths = self._lengths or {layer: state.length for layer, state in self.recurrent.items()}
        return next(reversed(lengths.values()), 0)

    @property
    def size_bytes(self) -> int:
        """Allocated memory, in bytes."""
        return self._state_bytes + sum(tensor.nbytes for tensor in (*self._keys.values(), *self._values.values()))

    @property
    def size(self) -> CacheSize:
        """Memory per token and per sequence for the layers of this cache, which must not be empty."""
        stores = (*self._keys.values(), *self._values.values())
        per_token = sum(heads * size * store.element_size() for store in stores for heads, _, size in [store.shape])
        return CacheSize(per_token, self._state_bytes)

    @property
    def _state_bytes(self) -> int:
        states = self.recurrent.values()
        return sum(tensor.nbytes for state in states for tensor in (state.inputs_CW, state.memory_VKH))

    def layer_length(self, layer: int) -> int:
        """Return the number of tokens stored for one attention layer."""
        return self._lengths.get(layer, 0)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens to a layer.

        Args:
            layer: index of the layer.
            keys: [n_kv_heads, new tokens, head_dim].
            values: [n_kv_heads, new tokens, head_dim].

        Returns:
            All keys and values of the layer, as views that the next append may invalidate.

        Raises:
            PackError: the layer would have more than `max_length` tokens.
        """
        if layer not in self._lengths:
            capacity = min(_FIRST_CAPACITY, self._max_length or _FIRST_CAPACITY)
            self._keys[layer] = _allocate(keys, capacity)
            self._values[layer] = _allocate(values, capacity)
            self._lengths[layer] = 0
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

    def copy(self) -> 'KVCache':
        """Return an independent copy, for example for another sample of the same prompt."""
        duplicate = KVCache(self._max_length)
        duplicate._keys = {layer: tensor.clone() for layer, tensor in self._keys.items()}
        duplicate._values = {layer: tensor.clone() for layer, tensor in self._values.items()}
        duplicate._lengths = dict(self._lengths)
        duplicate.recurrent = dict(self.recurrent)
        return duplicate


def _allocate(like: Tensor, capacity: int) -> Tensor:
    heads, _, head_dim = like.shape
    return torch.empty((heads, capacity, head_dim), dtype=like.dtype, device=like.device)


def _grown(tensor: Tensor, length: int, capacity: int) -> Tensor:
    grown = _allocate(tensor, capacity)
    grown[:, :length] = tensor[:, :length]
    return grown
