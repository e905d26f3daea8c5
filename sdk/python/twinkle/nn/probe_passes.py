"""Passes of the check of a loaded model: packs of short sequences, forward and backward (`twinkle.nn.probe`).

Legend: T rows of the pack, L rows of one sequence, R any selection of rows, D hidden size, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from twinkle.nn.kv_cache import KVCache
from twinkle.nn.spans import SequenceSpan

LENGTHS = (70, 5, 33, 1)
"""Number of tokens of each sequence: more than a chunk of a recurrent layer, a single token, and lengths between."""
CACHED = 2
"""Index of the sequence that is also decoded with a cache."""
DECODED_TOKENS = 5
"""Number of tokens at the end of the cached sequence, which are run one by one."""
CONTINUATIONS = ((45, None), (20, 0), (1, 0), (60, 0), (33, 1), (2, 1))
"""Spans of the tree of sequences that the check runs: number of rows, and index of the span that each continues. The
longest sequence has more rows than a chunk of a recurrent layer."""
WINDOW = 16
"""Sliding window during the check, in tokens."""


class PackedModel(Protocol):
    """Model that runs packs of sequences, as `PackedCausalLM` does."""

    config: Any
    """Text configuration of transformers."""
    can_share_prefixes: bool
    """Whether sequences can share the rows of a common prefix; set by the check."""

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


def sequences_of(config: Any, device: torch.device, *, seed: int = 0) -> list[Tensor]:
    """Return int64 [L] for each sequence: random tokens without special tokens, the same at each call."""
    plain = _plain_tokens(config)
    generator = torch.Generator().manual_seed(seed)
    return [plain[torch.randint(len(plain), (length,), generator=generator)].to(device) for length in LENGTHS]


def _plain_tokens(config: Any) -> Tensor:
    text = config.get_text_config()
    special = {value for name, value in text.to_dict().items() if name.endswith('_token_id') and isinstance(value, int)}
    return torch.tensor([token for token in range(min(text.vocab_size, 1024)) if token not in special])


def packs_of(packed: PackedModel) -> Iterator[tuple[frozenset[int], list[Tensor]]]:
    """Yield two packs with different tokens in every second sequence, and the indexes of the other sequences."""
    ids, others = (sequences_of(packed.config, packed.device, seed=seed) for seed in (0, 1))
    for parity in (0, 1):
        own = frozenset(range(parity, len(ids), 2))
        yield own, [ids[index] if index in own else others[index] for index in range(len(ids))]


def _hidden(packed: PackedModel, ids: Sequence[Tensor]) -> Tensor:
    """Return float [T, D] for the sequences of one pass."""
    spans: list[SequenceSpan] = []
    for tokens in ids:
        begin = spans[-1].end_row if spans else 0
        spans.append(SequenceSpan(begin, begin + len(tokens)))
    positions = torch.cat([torch.arange(len(tokens), device=tokens.device) for tokens in ids])
    return packed.hidden(torch.cat(list(ids)), positions, sequences=spans)


def tree_and_separate_outputs(packed: PackedModel) -> tuple[list[Tensor], list[Tensor]]:
    """Run the tree of `CONTINUATIONS` in shared rows, and the sequence that ends with each span in separate rows.

    Returns:
        Two lists with one float [L, D] per span: the outputs of its whole sequence, from shared and from separate rows.
    """
    plain, count = _plain_tokens(packed.config), sum(length for length, _ in CONTINUATIONS)
    tokens = plain[torch.randint(len(plain), (count,), generator=torch.Generator().manual_seed(0))].to(packed.device)
    spans: list[SequenceSpan] = []
    rows: list[Tensor] = []
    positions: list[Tensor] = []
    for length, parent in CONTINUATIONS:
        begin = spans[-1].end_row if spans else 0
        spans.append(SequenceSpan(begin, begin + length, parent=parent))
        own = torch.arange(begin, begin + length)
        rows.append(own if parent is None else torch.cat([rows[parent], own]))
        positions.append(torch.arange(len(rows[-1]) - length, len(rows[-1])))
    tree_TD = packed.hidden(tokens, torch.cat(positions).to(packed.device), sequences=spans)
    separate_RD = _hidden(packed, [tokens[own] for own in rows])
    return [tree_TD[own] for own in rows], list(separate_RD.split([len(own) for own in rows]))


def logits_of(packed: PackedModel, ids: Sequence[Tensor]) -> list[Tensor]:
    """Return float32 [L, V] for each of the sequences of one pass."""
    return list(packed.logits(_hidden(packed, ids)).split([len(tokens) for tokens in ids]))


def differentiated(packed: PackedModel, ids: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Run the sequences of one pass forward, and backward for fixed gradients of their outputs.

    Returns:
        Float [L, D] for each sequence: the outputs, and the gradients of the embeddings.
    """
    hidden_TD, embeddings = _hidden_and_embeddings(packed, ids)
    width = hidden_TD.shape[1]
    by_output = [torch.randn(len(tokens), width, generator=torch.Generator().manual_seed(0)) for tokens in ids]
    return _back(hidden_TD, embeddings, torch.cat(by_output), ids)


def poisoned(packed: PackedModel, ids: Sequence[Tensor], *, own: frozenset[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Run a pass in which the embeddings and output gradients of all sequences except `own` are NaN.

    The output gradients of `own` are zero, so that the gradients of their embeddings are exactly zero if no value of
    another sequence reaches them.

    Returns:
        The same as `differentiated`.
    """
    is_other_T = torch.cat([torch.full((len(tokens),), index not in own) for index, tokens in enumerate(ids)])
    hidden_TD, embeddings = _hidden_and_embeddings(packed, ids, is_nan_T=is_other_T)
    by_output_TD = torch.zeros(hidden_TD.shape).masked_fill(is_other_T[:, None], float('nan'))
    return _back(hidden_TD, embeddings, by_output_TD, ids)


def _hidden_and_embeddings(
    packed: PackedModel, ids: Sequence[Tensor], *, is_nan_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs [T, D] and the leaf that replaces the embeddings, with NaN in some rows."""
    leaves: list[Tensor] = []

    def replace(module: nn.Module, arguments: object, output: Tensor) -> Tensor:
        del module, arguments
        leaf = output.detach().clone()
        if is_nan_T is not None:
            leaf.flatten(0, -2)[: len(is_nan_T)].masked_fill_(is_nan_T[:, None].to(leaf.device), float('nan'))
        leaves.append(leaf.requires_grad_())
        return leaf.clone()

    handle = packed.backbone.get_input_embeddings().register_forward_hook(replace)
    try:
        with torch.enable_grad():
            hidden_TD = _hidden(packed, ids)
    finally:
        handle.remove()
    (embeddings,) = leaves
    return hidden_TD, embeddings


def _back(
    hidden_TD: Tensor, embeddings: Tensor, by_output_TD: Tensor, ids: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    (gradient,) = torch.autograd.grad(hidden_TD, embeddings, by_output_TD.to(hidden_TD))
    lengths = [len(tokens) for tokens in ids]
    return list(hidden_TD.detach().split(lengths)), list(gradient.flatten(0, -2)[: len(hidden_TD)].split(lengths))


def decoded_logits(packed: PackedModel, tokens: Tensor) -> Tensor:
    """Return float32 [L, V] of a sequence whose last `DECODED_TOKENS` tokens are run one by one with a cache."""
    cache, rows = KVCache(), []
    prompt = len(tokens) - DECODED_TOKENS
    positions = torch.arange(len(tokens), device=tokens.device)
    for begin, end in [(0, prompt), *((row, row + 1) for row in range(prompt, len(tokens)))]:
        span = SequenceSpan(0, end - begin, cache=cache)
        rows.append(packed.logits(packed.hidden(tokens[begin:end], positions[begin:end], sequences=[span])))
    return torch.cat(rows)
