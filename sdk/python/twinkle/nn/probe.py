"""Check of a loaded model: a pack of sequences computes what transformers computes for each of them.

Architectures are admitted, not assumed. Before a model is wrapped, transformers runs a few sequences of random tokens,
each alone. The wrapped model must then compute the same in one pack, in a pass per sequence, and token by token
with a cache. Sliding windows are shortened for the check, so that the sequences exceed them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twinkle.nn.delta_net import PackedDeltaNet
from twinkle.nn.errors import UnsupportedModel
from twinkle.nn.kv_cache import KVCache
from twinkle.nn.media import packed_attention_of
from twinkle.nn.spans import SequenceSpan

LENGTHS = (70, 5, 33, 1)
"""Tokens of each sequence: more than one chunk of a recurrent layer, a single token, and lengths between them."""
WINDOW = 16
"""Sliding window during the check, in tokens."""
_CACHED = 2
_DECODED_TOKENS = 3
_LAYER_TYPES = frozenset({'full_attention', 'sliding_attention', 'linear_attention'})
_ROPES_OF_THE_LONGEST = frozenset({'dynamic', 'longrope'})
"""Rotary embeddings whose frequencies depend on the longest sequence of a pass."""
_LIMIT = 1e-4
_MEDIAN_LIMIT = 0.1
"""Admitted differences of a row's logits, relative to their norm: of every row in float32, and of the median row in
half precision, where rounding alone changes some rows of a deep model completely."""


_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class PackedModel(Protocol):
    """Model that runs packs of sequences, as `PackedCausalLM` does."""

    config: Any
    """Text configuration of transformers."""

    @property
    def backbone(self) -> nn.Module:
        """Model without its output head."""
        ...

    @property
    def dtype_name(self) -> str:
        """Name of the torch dtype of the weights."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        ...

    def hidden(self, input_ids_T: Tensor, position_ids_T: Tensor, *, sequences: Sequence[SequenceSpan]) -> Tensor:
        """Return float [T, D], the outputs of the backbone."""
        ...

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return float32 [R, V]."""
        ...


@contextmanager
def refusing(model: PreTrainedModel) -> Iterator[None]:
    """Name the architecture in refusals, and turn failures of its code into refusals.

    Raises:
        UnsupportedModel: the block raised an error other than one about memory.
    """
    name = f'{type(model).__name__} (model_type {model.config.model_type!r})'
    try:
        yield
    except UnsupportedModel as error:
        raise UnsupportedModel(f'{name} is not supported: {error}') from error
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except _FAILURES as error:
        problem = f'{type(error).__name__}: {error}'
        raise UnsupportedModel(f'{name} is not supported: a pass of a few sequences failed with {problem}') from error


def check_configuration(packed: PackedModel) -> None:
    """Check that no layer fails to run packed at lengths that `check_packed` does not try.

    Raises:
        UnsupportedModel: a layer has an unknown type, or a position's embedding depends on other sequences.
    """
    ropes = sorted(_ropes(getattr(packed.config, 'rope_parameters', None) or {}) & _ROPES_OF_THE_LONGEST)
    if ropes:
        raise UnsupportedModel(
            f'its rotary embedding of type {ropes[0]} depends on the longest sequence of a pass; set rope_type to '
            "'default' in config.json if sequences fit the original context"
        )
    types = list(getattr(packed.config, 'layer_types', None) or [])
    unknown = sorted(set(types) - _LAYER_TYPES)
    recurrent = sum(isinstance(module, PackedDeltaNet) for module in packed.backbone.modules())
    if types.count('linear_attention') != recurrent:
        unknown.append('linear_attention (other than Gated DeltaNet)')
    if unknown:
        raise UnsupportedModel(f'its layers of type {", ".join(unknown)} cannot run packed sequences')


def _ropes(parameters: Mapping[str, Any]) -> set[Any]:
    """Return the types of rotary embeddings, which a model may declare for each type of layer."""
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return {parameters.get('rope_type')}.union(*(_ropes(value) for value in nested))


@torch.no_grad()
def reference_of(model: PreTrainedModel) -> list[Tensor]:
    """Return float32 [L, V] for each sequence of the check, as transformers computes them. The model is not changed."""
    model.eval().set_attn_implementation('eager')
    try:
        with short_windows(model):
            return [
                model(ids[None], use_cache=False).logits[0].float() for ids in _sequences(model.config, model.device)
            ]
    finally:
        model.set_attn_implementation(packed_attention_of(model.config))


@torch.no_grad()
def check_packed(packed: PackedModel, reference: Sequence[Tensor]) -> None:
    """Check that a pack equals transformers and keeps its sequences apart, and that decoding with a cache equals both.

    On a CPU, results and gradients of a sequence must be bitwise the same in a pack and alone. Accelerators choose
    kernels by the size of a pass, so there the limits for differences from transformers apply.

    Raises:
        UnsupportedModel: a result differs; the message says which one.
    """
    ids = _sequences(packed.config, packed.device)
    with short_windows(packed.backbone):
        together = _logits(packed, ids)
        alone = [_logits(packed, [tokens])[0] for tokens in ids]
        decoded = _decoded_logits(packed, ids[_CACHED])
    is_half = packed.dtype_name != 'float32'
    _check_close(together, reference, 'a pack differs from transformers', is_half=is_half)
    _check_close([decoded], [reference[_CACHED]], 'decoding with a cache differs', is_half=is_half)
    if packed.device.type == 'cpu':
        _check_equal(together, alone, 'results')
        with short_windows(packed.backbone):
            _check_equal(_gradients(packed, ids), [_gradients(packed, [tokens])[0] for tokens in ids], 'gradients')
    else:
        _check_close(together, alone, 'sequences in a pack and alone differ', is_half=is_half)


@contextmanager
def short_windows(model: nn.Module) -> Iterator[None]:
    """Set the sliding windows of a model to `WINDOW` tokens within the block."""
    holders: list[Any] = [module for module in model.modules() if getattr(module, 'sliding_window', None)]
    configs = {id(config): config for module in model.modules() if (config := getattr(module, 'config', None))}
    holders += [config for config in configs.values() if getattr(config, 'sliding_window', None)]
    windows = [holder.sliding_window for holder in holders]
    try:
        for holder in holders:
            holder.sliding_window = WINDOW
        yield
    finally:
        for holder, window in zip(holders, windows, strict=True):
            holder.sliding_window = window


def _sequences(config: Any, device: torch.device) -> list[Tensor]:
    """Return int64 [L] for each sequence: random tokens without special ones, the same at each call."""
    text = config.get_text_config()
    special = {value for name, value in text.to_dict().items() if name.endswith('_token_id') and isinstance(value, int)}
    plain = torch.tensor([token for token in range(min(text.vocab_size, 1024)) if token not in special])
    generator = _generator()
    return [plain[torch.randint(len(plain), (length,), generator=generator)].to(device) for length in LENGTHS]


def _hidden(packed: PackedModel, ids: Sequence[Tensor]) -> Tensor:
    """Return float [T, D] for the sequences of one pass."""
    spans: list[SequenceSpan] = []
    for tokens in ids:
        begin = spans[-1].end_row if spans else 0
        spans.append(SequenceSpan(begin, begin + len(tokens)))
    positions = torch.cat([torch.arange(len(tokens), device=tokens.device) for tokens in ids])
    return packed.hidden(torch.cat(list(ids)), positions, sequences=spans)


def _logits(packed: PackedModel, ids: Sequence[Tensor]) -> list[Tensor]:
    """Return float32 [L, V] for each of the sequences of one pass."""
    return list(packed.logits(_hidden(packed, ids)).split([len(tokens) for tokens in ids]))


def _gradients(packed: PackedModel, ids: Sequence[Tensor]) -> list[Tensor]:
    """Return float [L, D] for each sequence: the gradients of its embeddings, for fixed gradients of its outputs."""
    inputs: list[Tensor] = []

    def record(module: nn.Module, arguments: object, output: Tensor) -> Tensor:
        del module, arguments
        inputs.append(output.detach().requires_grad_())
        return inputs[0].clone()

    handle = packed.backbone.get_input_embeddings().register_forward_hook(record)
    with torch.enable_grad():
        hidden_TD = _hidden(packed, ids)
        (embeddings,) = inputs
    handle.remove()
    outputs = torch.cat([torch.randn(len(x), hidden_TD.shape[1], generator=_generator()) for x in ids]).to(hidden_TD)
    (gradient,) = torch.autograd.grad(hidden_TD, embeddings, outputs)
    return list(gradient.flatten(0, -2)[: len(hidden_TD)].split([len(tokens) for tokens in ids]))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _decoded_logits(packed: PackedModel, tokens: Tensor) -> Tensor:
    """Return float32 [L, V] of a sequence whose last tokens are run one by one with a cache."""
    cache, rows = KVCache(), []
    prompt = len(tokens) - _DECODED_TOKENS
    positions = torch.arange(len(tokens), device=tokens.device)
    for begin, end in [(0, prompt), *((row, row + 1) for row in range(prompt, len(tokens)))]:
        span = SequenceSpan(0, end - begin, cache=cache)
        rows.append(packed.logits(packed.hidden(tokens[begin:end], positions[begin:end], sequences=[span])))
    return torch.cat(rows)


def _check_equal(own: Sequence[Tensor], solo: Sequence[Tensor], values: str) -> None:
    if not all(torch.equal(*pair) for pair in zip(own, solo, strict=True)):
        raise UnsupportedModel(f'{values} of a sequence depend on the other sequences of a pack')


def _check_close(own: Sequence[Tensor], expected: Sequence[Tensor], finding: str, *, is_half: bool) -> None:
    own_RV, expected_RV = torch.cat(list(own)), torch.cat(list(expected))
    difference_R = (own_RV - expected_RV).norm(dim=1) / expected_RV.norm(dim=1)
    difference, limit = (difference_R.median(), _MEDIAN_LIMIT) if is_half else (difference_R.max(), _LIMIT)
    if not difference <= limit:
        raise UnsupportedModel(f'{finding}, by {float(difference):.2g} of the norm of the logits (limit {limit:g})')
