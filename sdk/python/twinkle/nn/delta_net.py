"""Gated DeltaNet layers (Yang et al. 2024, arXiv 2412.06464) that keep the states of the sequences of a pack separate.

Transformers runs the convolution and the recurrence of these layers over all rows of a pack, so that state would flow
from one sequence into the next. `PackedDeltaNet` projects all rows together and runs the rest within each sequence.

Legend: T rows of the pack, L rows of one span, D hidden size, C channels of the convolution, W its width, P = W - 1 + L
inputs of the convolution, G key heads, V value heads, K size of a key, H size of a value, E = V H outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu, softplus

from twinkle.nn.attention import SEQUENCES_ARGUMENT
from twinkle.nn.kv_cache import KVCache, RecurrentState
from twinkle.nn.rows import pad_rows
from twinkle.nn.sequences import PackedSequences

CHUNK_ROWS = 64
"""Rows whose updates of the state are solved together (section 3.3 of the paper)."""
_SHARED = ('conv1d', 'norm', 'out_proj')
"""Names of the submodules of every Gated DeltaNet layer."""
_PROJECTIONS = (('in_proj_qkvz', 'in_proj_ba'), ('in_proj_qkv', 'in_proj_z', 'in_proj_b', 'in_proj_a'))
"""Names of the input projections of Qwen3-Next, which interleaves its heads, and then those of Qwen3.5."""


@dataclass(frozen=True)
class _Rows:
    """Projected rows, [T, ...] or [L, ...]."""

    mixed_TC: Tensor
    gate_TVH: Tensor
    beta_TV: Tensor
    decay_TV: Tensor

    def split(self, lengths: Sequence[int]) -> list['_Rows']:
        """Return the rows of each sequence as copies, because results depend on a tensor's alignment."""
        parts = [
            [part.clone() for part in x.split([*lengths, len(x) - sum(lengths)])[: len(lengths)]] for x in self.tensors
        ]
        return [_Rows(*row) for row in zip(*parts, strict=True)]

    @classmethod
    def joined(cls, first: '_Rows', second: '_Rows') -> '_Rows':
        """Return the rows of `first`, followed by the rows of `second`."""
        return cls(*(torch.cat(pair) for pair in zip(first.tensors, second.tensors, strict=True)))

    def after(self, begin: int) -> '_Rows':
        """Return the rows from `begin` on."""
        return _Rows(*(x[begin:] for x in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All tensors, in the order of the fields."""
        return self.mixed_TC, self.gate_TVH, self.beta_TV, self.decay_TV


@dataclass(frozen=True)
class _Branch:
    """State at the end of a span, from which several spans may continue."""

    rows: _Rows
    """Rows of the incomplete chunk at the end, possibly none."""
    inputs_CW: Tensor
    """[C, W - 1]: inputs of the convolution before these rows."""
    memory_VKH: Tensor | None
    """float32 [V, K, H]: state before these rows; None for zeros."""


class PackedDeltaNet(nn.Module):
    """Gated DeltaNet layer with the submodules of the replaced layer, under their names.

    Args:
        layer: module of transformers that `is_delta_net` recognizes; it loses its submodules, and keeps its parameters.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        for name, child in list(layer.named_children()):
            delattr(layer, name)
            self.add_module(name, child)
        self.source = layer
        self.layer_idx: int = layer.layer_idx
        self._key_heads, self._value_heads = layer.num_k_heads, layer.num_v_heads
        self._key_size, self._value_size = layer.head_k_dim, layer.head_v_dim
        self._width: int = self.conv1d.weight.shape[-1]

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **arguments: Any
    ) -> Tensor:
        """Return float [1, T, D] for `hidden_states [1, T, D]`; rows outside all sequences are zero."""
        del cache_params, attention_mask
        sequences: PackedSequences = arguments[SEQUENCES_ARGUMENT]
        rows = self._project(hidden_states[0])
        outputs: list[Tensor] = []
        branches: list[_Branch | None] = []
        for part, span in zip(rows.split(sequences.lengths), sequences.spans, strict=True):
            if span.cache is None:
                output, branch = self._continued(part, None if span.parent is None else branches[span.parent])
            else:
                output, branch = self._cached(part, span.cache), None
            outputs.append(output)
            branches.append(branch)
        padding = hidden_states.shape[1] - sum(sequences.lengths)
        outputs.append(hidden_states.new_zeros(padding, self._value_heads * self._value_size))
        return self.out_proj(torch.cat(outputs))[None]

    def _project(self, x_TD: Tensor) -> _Rows:
        values = self._value_heads, self._value_size
        if hasattr(self, 'in_proj_qkv'):
            return _Rows(
                self.in_proj_qkv(x_TD),
                self.in_proj_z(x_TD).unflatten(-1, values),
                self.in_proj_b(x_TD),
                self.in_proj_a(x_TD),
            )
        # The projections contain, for each key head, its query, its key, and its values and gates.
        group = self._value_heads // self._key_heads
        sizes = [self._key_size, self._key_size, group * self._value_size, group * self._value_size]
        query, key, value, gate = self.in_proj_qkvz(x_TD).unflatten(-1, (self._key_heads, -1)).split(sizes, dim=-1)
        beta, decay = self.in_proj_ba(x_TD).unflatten(-1, (self._key_heads, -1)).split([group, group], dim=-1)
        mixed = torch.cat([part.flatten(1) for part in (query, key, value)], dim=-1)
        return _Rows(mixed, gate.reshape(-1, *values), beta.flatten(1), decay.flatten(1))

    def _continued(self, own: _Rows, start: '_Branch | None') -> tuple[Tensor, '_Branch']:
        """Return [L, E] for rows that continue a sequence, and the branch from which other spans continue.

        Every sequence is divided into chunks at the same positions, whether its rows are shared or not, and its last
        chunk is padded. A row's result therefore does not depend on later rows. Rows that continue an incomplete chunk
        compute the rows of that chunk again.
        """
        rows = own if start is None else _Rows.joined(start.rows, own)
        before_CW = None if start is None else start.inputs_CW
        mixed_LC, inputs_CP = self._convolve(rows.mixed_TC, before_CW)
        output_LE, memories = self._recur(rows, mixed_LC, None if start is None else start.memory_VKH, is_padded=True)
        complete = len(mixed_LC) // CHUNK_ROWS
        boundary = complete * CHUNK_ROWS
        inputs_CW = inputs_CP[:, boundary : boundary + self._width - 1]
        memory = None if start is None else start.memory_VKH
        if complete:
            memory = memories[complete - 1]
        return output_LE[len(mixed_LC) - len(own.mixed_TC) :], _Branch(rows.after(boundary), inputs_CW, memory)

    def _cached(self, rows: _Rows, cache: KVCache) -> Tensor:
        """Return [L, E] for the next rows of a sequence with a cache, and update the cache."""
        state = cache.recurrent.get(self.layer_idx)
        mixed_LC, inputs_CP = self._convolve(rows.mixed_TC, None if state is None else state.inputs_CW)
        memory = None if state is None else state.memory_VKH
        output_LE, memories = self._recur(rows, mixed_LC, memory, is_padded=len(mixed_LC) > 1)
        length = len(rows.mixed_TC) + (0 if state is None else state.length)
        inputs_CW = inputs_CP[:, -(self._width - 1) :].detach().clone()
        cache.recurrent[self.layer_idx] = RecurrentState(length, inputs_CW, memories[-1])
        return output_LE

    def _recur(
        self, rows: _Rows, mixed_LC: Tensor, memory_VKH: Tensor | None, *, is_padded: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Return [L, E] for convolved rows, and the state after each chunk.

        If `is_padded`, the last chunk is filled with rows that change nothing, so that all chunks have equal shapes.
        """
        length = len(mixed_LC)
        padded = length + -length % CHUNK_ROWS if is_padded else length
        sizes = [self._key_heads * self._key_size] * 2 + [self._value_heads * self._value_size]
        query, key, value = mixed_LC.split(sizes, dim=-1)
        group = self._value_heads // self._key_heads
        query_LVK, key_LVK = (
            x.unflatten(-1, (self._key_heads, -1)).repeat_interleave(group, dim=1).float() for x in (query, key)
        )
        value_LVH = value.unflatten(-1, (self._value_heads, -1)).float()
        # softplus and sigmoid round the elements of a scalar tail differently (`twinkle.nn.rows`), so rows are padded.
        speed_LV = softplus(pad_rows(rows.decay_TV.float() + self.source.dt_bias, padded))[:length]
        beta_LV = pad_rows(rows.beta_TV.float(), padded).sigmoid()[:length]
        inputs = (
            _unit(query_LVK) * self._key_size**-0.5,
            _unit(key_LVK),
            value_LVH,
            -self.source.A_log.float().exp() * speed_LV,
            beta_LV,
        )
        output_LVH, memories = gated_delta_rule(*(pad_rows(x, padded) for x in inputs), memory_VKH)
        output_LVH = output_LVH[:length]
        normed = self.norm(output_LVH.to(rows.mixed_TC.dtype).flatten(0, 1), rows.gate_TVH.flatten(0, 1))
        return normed.view(len(output_LVH), -1), memories

    def _convolve(self, mixed_LC: Tensor, before_CW: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the convolved rows [L, C], and all their inputs [C, W - 1 + L]."""
        weight_C1W = self.conv1d.weight
        channels, width = weight_C1W.shape[0], weight_C1W.shape[-1]
        if before_CW is None:
            before_CW = mixed_LC.new_zeros(channels, width - 1)
        inputs = torch.cat([before_CW, mixed_LC.T], dim=-1)
        outputs = conv1d(inputs[None].to(weight_C1W.dtype), weight_C1W, self.conv1d.bias, groups=channels)[0]
        return silu(outputs).T.to(mixed_LC.dtype), inputs


def is_delta_net(module: nn.Module) -> bool:
    """Return whether a module has the parameters of a Gated DeltaNet layer of transformers."""
    names = {name for name, _ in module.named_children()}
    has_decay = hasattr(module, 'A_log') and hasattr(module, 'dt_bias')
    return has_decay and any(names >= {*_SHARED, *projections} for projections in _PROJECTIONS)


def gated_delta_rule(
    query_LVK: Tensor,
    key_LVK: Tensor,
    value_LVH: Tensor,
    decay_LV: Tensor,
    beta_LV: Tensor,
    memory_VKH: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Apply the gated delta rule to one sequence: `S = exp(g) S (I - beta k k^T) + beta v k^T` and `o = S q`, per row.

    Rows are handled in chunks; within a chunk the updates form a unit triangular system (equations 8 to 10).

    Args:
        query_LVK: float32, normalized and scaled.
        key_LVK: float32, normalized.
        value_LVH: float32.
        decay_LV: float32, natural logarithm of the decay, at most 0.
        beta_LV: float32 in (0, 1), the strength of each update.
        memory_VKH: state before the first row; None for zeros.

    Returns:
        Outputs, float32 [L, V, H], and the state after each chunk of `CHUNK_ROWS` rows, float32 [V, K, H] each.
    """
    heads, keys, values = query_LVK.shape[1], query_LVK.shape[2], value_LVH.shape[2]
    memory = value_LVH.new_zeros(heads, keys, values) if memory_VKH is None else memory_VKH
    outputs: list[Tensor] = []
    memories: list[Tensor] = []
    chunks = (x.split(CHUNK_ROWS) for x in (query_LVK, key_LVK, value_LVH, decay_LV, beta_LV))
    for query, key, value, decay, beta in zip(*chunks, strict=True):
        output, memory = _chunk(
            query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), decay.T, beta.T[..., None], memory
        )
        outputs.append(output.transpose(0, 1))
        memories.append(memory)
    return torch.cat(outputs), memories


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a chunk's outputs [V, B, H], for B rows, and the state after it. Axis 0 of all arguments is the head."""
    total = decay.cumsum(dim=-1)
    is_later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    # Differences of earlier to later rows are positive, so they are masked before the exponential can overflow.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(is_later, float('-inf')).exp()
    grown = total.exp()[..., None]
    system = (beta * key) @ key.transpose(-1, -2) * between
    solved = torch.linalg.solve_triangular(
        system, beta * torch.cat([value, grown * key], dim=-1), upper=False, unitriangular=True
    )
    updates, reads = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    updates = updates - reads @ memory
    output = (grown * query) @ memory + (query @ key.transpose(-1, -2) * between) @ updates
    remaining = (total[..., -1:] - total).exp()[..., None]
    return output, grown[:, -1:] * memory + (remaining * key).transpose(-1, -2) @ updates


def _unit(x: Tensor) -> Tensor:
    """Return `x` with its last axis divided by `sqrt(sum(x^2) + 1e-6)`."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)
