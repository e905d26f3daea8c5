"""Check of a loaded model: for each sequence of a pack, the results must equal the results of transformers.

An architecture is supported only if it passes this check. Before a model is wrapped, transformers runs a few sequences
of random tokens, each alone. The wrapped model must then compute the same in one pack, and token by token with a cache.
A half-precision model is also compared in float32, where an error cannot be mistaken for rounding. Sliding windows are
shortened for the check, so that the sequences exceed them.

On a CPU, the results and gradients of a sequence must be bitwise the same alone and in a pack. On accelerators, a
tolerance applies, and NaN in the embeddings and gradients of other sequences must not reach the sequence. A model whose
results differ when sequences share the rows of a prefix is not refused; it computes all sequences separately.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from twinkle.nn.cpu_products import has_padded_sums
from twinkle.nn.delta_net import PackedDeltaNet
from twinkle.nn.errors import UnsupportedModel
from twinkle.nn.float32_weights import float32_weights
from twinkle.nn.media import packed_attention_of
from twinkle.nn.probe_passes import (
    CACHED,
    DECODED_TOKENS,
    PackedModel,
    decoded_logits,
    differentiated,
    logits_of,
    packs_of,
    poisoned,
    sequences_of,
    short_windows,
    tree_and_separate_outputs,
)
from twinkle.nn.sequences import KEY_BLOCK, UNSPLIT_KEYS

_logger = logging.getLogger(__name__)

_LAYER_TYPES = frozenset({'full_attention', 'sliding_attention', 'linear_attention'})
"""Types of layers that can run packed."""
_ROPES_OF_THE_LONGEST = frozenset({'dynamic', 'longrope'})
"""Rotary embeddings whose frequencies depend on the longest sequence of a pass."""
_LIMIT = 1e-4
_MEDIAN_LIMIT = 0.1
"""Limits of the difference of a row's logits, relative to their norm. `_LIMIT` applies to every row in float32, and
`_MEDIAN_LIMIT` to the median row of each sequence in half precision, where rounding alone changes some rows of a deep
model completely."""
_MEDIAN_ROWS = 5
"""Minimum number of rows for a comparison by the median."""
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
"""Exceptions that the code of an unsupported architecture may raise."""


@contextmanager
def refusing(model: PreTrainedModel) -> Iterator[None]:
    """Name the architecture in refusals, and turn failures of its code into refusals.

    Raises:
        UnsupportedModel: the block raised it, or one of `_FAILURES` other than `torch.OutOfMemoryError`.
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
    """Refuse layers that would fail only on longer sequences than `check_packed` runs.

    Raises:
        UnsupportedModel: a layer has an unknown type, or rotary embeddings depend on the longest sequence of a pass.
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


@dataclass(frozen=True)
class Reference:
    """Logits of the sequences of the check, as transformers computes them.

    One float32 tensor [L, V] per sequence, with L tokens and vocabulary size V.
    """

    own: Sequence[Tensor]
    """Logits in the dtype of the model."""
    precise: Sequence[Tensor] | None
    """Logits in float32. None for a float32 model, and for a model that transformers cannot run in float32."""


def reference_of(model: PreTrainedModel) -> Reference:
    """Run the sequences of the check with transformers' own attention.

    Afterwards, the model is in evaluation mode and has packed attention.
    """
    model.eval().set_attn_implementation('eager')
    try:
        own = _plain_logits(model)
        precise = None
        if model.dtype != torch.float32:
            # Quantized layers and some kernels support only half precision, or a float32 copy does not fit in memory.
            with suppress(*_FAILURES), float32_weights(model):
                precise = _plain_logits(model)
        return Reference(own, precise)
    finally:
        model.set_attn_implementation(packed_attention_of(model.config))


@torch.no_grad()
def _plain_logits(model: PreTrainedModel) -> list[Tensor]:
    with short_windows(model):
        ids = sequences_of(model.config, model.device)
        return [model(tokens[None], use_cache=False).logits[0].float() for tokens in ids]


def check_packed(packed: PackedModel, model: nn.Module, reference: Reference, *, is_bitwise: bool) -> None:
    """Check a pack and decoding with a cache against transformers, and the independence of a pack's sequences.

    Args:
        packed: model to check.
        model: module with all weights of `packed`.
        reference: results of the model before it was wrapped.
        is_bitwise: whether results and gradients of a sequence must be bitwise independent of the pack, as on a CPU.
            Accelerators choose kernels by the size of a pass, so there the limits for differences from transformers
            apply, and values of other sequences must have no effect at all.

    Raises:
        UnsupportedModel: a result differs; the message names the result.
    """
    with short_windows(packed.backbone):
        if reference.precise is not None:
            with float32_weights(model):
                _check_results(packed, reference.precise)
        _check_results(packed, reference.own)
        if is_bitwise:
            _check_bitwise_isolated(packed)
        else:
            _check_isolated(packed)
            _check_poisoned(packed)
        packed.can_share_prefixes = _can_share_prefixes(packed, is_bitwise=is_bitwise)


@torch.no_grad()
def _can_share_prefixes(packed: PackedModel, *, is_bitwise: bool) -> bool:
    """Return whether sequences that share the rows of a prefix give the results of separate sequences."""
    shared, separate = tree_and_separate_outputs(packed)
    if is_bitwise:
        # The sequences of this check are short, so longer sums of attention are checked separately.
        is_equal = all(map(torch.equal, shared, separate)) and has_padded_sums(UNSPLIT_KEYS, KEY_BLOCK)
    else:
        own, expected = ([packed.logits(hidden) for hidden in outputs] for outputs in (shared, separate))
        is_equal = _difference(own, expected, is_half=packed.dtype_name != 'float32') is None
    if not is_equal:
        _logger.warning('prefixes are not shared, because results differ: model_type=%s', packed.config.model_type)
    return is_equal


@torch.no_grad()
def _check_results(packed: PackedModel, reference: Sequence[Tensor]) -> None:
    """Compare a pack and decoded tokens with transformers."""
    ids = sequences_of(packed.config, packed.device)
    is_half = packed.dtype_name != 'float32'
    _check_close(logits_of(packed, ids), reference, 'a pack differs from transformers', is_half=is_half)
    parts = [len(ids[CACHED]) - DECODED_TOKENS, DECODED_TOKENS]
    decoded = decoded_logits(packed, ids[CACHED]).split(parts)
    _check_close(decoded, reference[CACHED].split(parts), 'decoding with a cache differs', is_half=is_half)


def _check_bitwise_isolated(packed: PackedModel) -> None:
    """Compare the results and gradients of each sequence alone and together with others, whose tokens vary."""
    alone = [differentiated(packed, [tokens]) for tokens in sequences_of(packed.config, packed.device)]
    for own, pack in packs_of(packed):
        outputs, gradients = differentiated(packed, pack)
        _check_equal([outputs[index] for index in own], [alone[index][0][0] for index in own], 'results')
        _check_equal([gradients[index] for index in own], [alone[index][1][0] for index in own], 'gradients')


@torch.no_grad()
def _check_isolated(packed: PackedModel) -> None:
    """Compare the results of each sequence alone, in a pack, and together with other tokens, within the limits."""
    ids = sequences_of(packed.config, packed.device)
    is_half = packed.dtype_name != 'float32'
    together = logits_of(packed, ids)
    alone = [logits_of(packed, [tokens])[0] for tokens in ids]
    _check_close(together, alone, 'sequences in a pack and alone differ', is_half=is_half)
    for own, pack in packs_of(packed):
        changed = logits_of(packed, pack)
        pairs = [changed[index] for index in own], [together[index] for index in own]
        _check_close(*pairs, 'a sequence changes with the tokens of other sequences', is_half=is_half)


def _check_poisoned(packed: PackedModel) -> None:
    """Check that NaN in the embeddings and output gradients of other sequences does not reach a sequence."""
    for own, pack in packs_of(packed):
        outputs, gradients = poisoned(packed, pack, own=own)
        if not all(outputs[index].isfinite().all() for index in own):
            raise UnsupportedModel('results of a sequence depend on values of the other sequences of a pack')
        if any(gradients[index].any() for index in own):
            raise UnsupportedModel('gradients of a sequence depend on values of the other sequences of a pack')


def _check_equal(own: Sequence[Tensor], alone: Sequence[Tensor], values: str) -> None:
    if not all(torch.equal(*pair) for pair in zip(own, alone, strict=True)):
        raise UnsupportedModel(f'{values} of a sequence depend on the other sequences of a pack')


def _check_close(own: Sequence[Tensor], expected: Sequence[Tensor], finding: str, *, is_half: bool) -> None:
    problem = _difference(own, expected, is_half=is_half)
    if problem is not None:
        raise UnsupportedModel(f'{finding}, {problem}')


def _difference(own: Sequence[Tensor], expected: Sequence[Tensor], *, is_half: bool) -> str | None:
    """Compare the logits [L, V] of each sequence: all rows in float32, and the median row in half precision.

    Returns:
        Description of a difference above the limit; None if all differences are within it.
    """
    for own_LV, expected_LV in zip(own, expected, strict=True):
        difference_L = (own_LV - expected_LV).norm(dim=1) / expected_LV.norm(dim=1)
        if is_half and len(difference_L) < _MEDIAN_ROWS:
            continue
        difference, limit = (difference_L.median(), _MEDIAN_LIMIT) if is_half else (difference_L.max(), _LIMIT)
        if not difference <= limit:
            return f'by {float(difference):.2g} of the norm of the logits (limit {limit:g})'
    return None
