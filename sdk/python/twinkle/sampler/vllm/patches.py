"""What is changed in vLLM 0.32, whose faults are no upstream issues known to us; look again when the version grows.

* LoRA on a CPU gives rows of the base model the last slot's adapter while every slot is taken; ours skips them, and
  multiplies once for each adapter. LoRA on the head breaks log-probabilities of prompts: heads are left alone.
* A reload on a CPU leaves a tied head with a packed copy of the old embeddings; ours packs it again.
* Adapters in mapped memory are put into slots by one batched copy.
* Blocks of keys and values are cleared before use on a CPU, and forms of outputs bounded and continued: see below.
"""

from collections.abc import Callable
from typing import Any

import vllm
from torch import Tensor
from vllm.lora import model_manager
from vllm.lora.punica_wrapper import punica_cpu
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from twinkle.sampler.vllm.adapters import MappedAdapter, Slots
from twinkle.sampler.vllm.forms import Patience, begun_tokens

PATCHED_VERSIONS = ('0.32.',)
"""Beginnings of the versions that need the changes and that they fit."""


class UnknownVllm(RuntimeError):
    """This vLLM is another than the changes were written for."""


def apply() -> None:
    """Change vLLM in this process; once is enough, twice does no harm.

    Raises:
        UnknownVllm: the installed version is not one that was tried; serving would be a gamble.
    """
    if not vllm.__version__.startswith(PATCHED_VERSIONS):
        raise UnknownVllm(f'vLLM {vllm.__version__} was not tried; install one of {PATCHED_VERSIONS}')
    model_manager.get_supported_lora_modules = _linear_modules
    model_manager.LoRAModelManager.activate_adapter = _activate_adapter
    XgrammarGrammar.accept_tokens = _accept_tokens
    XgrammarGrammar.fill_bitmask = _fill_bitmask
    StructuredOutputManager._create_grammar = _create_grammar  # noqa: SLF001 - it has no public name
    if current_platform.is_cpu():
        KVCacheConfig.needs_kv_cache_zeroing = property(_is_cleared)
        punica_cpu.PunicaWrapperCPU.update_metadata = _update_metadata
        punica_cpu.PunicaWrapperCPU.add_lora_linear = _add_lora_linear


_supported_lora_modules: Callable[[Any], list[str]] = model_manager.get_supported_lora_modules
_stock_update_metadata: Callable[..., None] = punica_cpu.PunicaWrapperCPU.update_metadata


_stock_activate_adapter: Callable[..., bool] = model_manager.LoRAModelManager.activate_adapter
_stock_accept_tokens: Callable[..., bool] = XgrammarGrammar.accept_tokens
_stock_fill_bitmask: Callable[..., None] = XgrammarGrammar.fill_bitmask
_stock_create_grammar: Callable[..., Any] = StructuredOutputManager._create_grammar  # noqa: SLF001 - as below


def forget_slots(manager: Any) -> None:
    """Let every slot of a manager be filled anew, whatever it was filled with."""
    manager.twinkle_slots = Slots(manager)


def pack_heads(model: Any) -> None:
    """Have the heads of a model compute with the weights that they hold now, not with a copy of those they held."""
    for module in model.modules():
        method = getattr(module, 'quant_method', None)
        if isinstance(module, ParallelLMHead) and isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)


def _activate_adapter(self: Any, lora_id: int) -> bool:
    """Put an adapter into a free slot, unless it has one; vLLM has made room before."""
    adapter = self._registered_adapters[lora_id]
    if not isinstance(adapter, MappedAdapter):
        if lora_id not in self._active_adapters:
            # It may fill a slot that we believe to know.
            forget_slots(self)
        return _stock_activate_adapter(self, lora_id)
    if lora_id in self._active_adapters:
        return False
    slot = self.lora_index_to_id.index(None)
    if not hasattr(self, 'twinkle_slots'):
        forget_slots(self)
    self.twinkle_slots.fill(slot, adapter)
    self._active_adapters[lora_id] = None
    self.lora_index_to_id[slot] = lora_id
    return True


def _patience_of(grammar: Any) -> Patience:
    if not hasattr(grammar, 'twinkle_patience'):
        grammar.twinkle_patience = Patience()
    return grammar.twinkle_patience


def _accept_tokens(self: Any, request_id: str, tokens: list[int]) -> bool:
    """Follow the form by tokens; where that has cost too much, say that they do not belong to it."""
    patience = _patience_of(self)
    with patience.spending(len(tokens)):
        is_accepted = _stock_accept_tokens(self, request_id, tokens)
    return is_accepted and not patience.is_exhausted


def _fill_bitmask(self: Any, bitmask: Tensor, index: int) -> None:
    """Find out which tokens may follow, and count what that costs."""
    with _patience_of(self).spending():
        _stock_fill_bitmask(self, bitmask, index)


def _create_grammar(self: Any, request: Any) -> Any:
    """Prepare a request's form, where another engine began its output for what is left of it."""
    grammar = _stock_create_grammar(self, request)
    begun = begun_tokens(request.sampling_params, request.prompt_token_ids)
    if begun and not grammar.accept_tokens(request.request_id, begun):
        raise ValueError('what was drawn so far does not have the form')
    return grammar


def _is_cleared(_: KVCacheConfig) -> bool:
    """Have vLLM clear blocks of keys and values before it gives them to a sequence.

    Attention on a CPU multiplies what lies behind a sequence in its block by 0, and 0 times NaN is NaN: after one
    adapter with such weights all answers of the engine were NaN for good.
    """
    return True


def _linear_modules(model: Any) -> list[str]:
    """Return vLLM's list without embeddings and heads."""
    embeddings = {name for module in model.modules() for name in (getattr(module, 'embedding_modules', None) or ())}
    return [name for name in _supported_lora_modules(model) if name not in embeddings]


def _update_metadata(self: Any, *args: Any, **kwargs: Any) -> None:
    """Note once a step which rows each adapter has; every layer asks."""
    _stock_update_metadata(self, *args, **kwargs)
    self.twinkle_rows = adapter_rows(self.token_lora_indices)


def adapter_rows(slots_T: Tensor) -> list[tuple[int, 'slice | Tensor']]:
    """Return the slot and the rows of each adapter in a batch; rows of the base model are in none.

    Args:
        slots_T: slot of each row, -1 for the base model.
    """
    groups: list[tuple[int, slice | Tensor]] = []
    for slot in slots_T.unique().tolist():
        if slot < 0:
            continue
        rows = (slots_T == slot).nonzero().squeeze(1)
        begin, end = int(rows[0]), int(rows[-1]) + 1
        groups.append((slot, slice(begin, end) if end - begin == len(rows) else rows))
    return groups


def _add_lora_linear(
    self: Any, y: Tensor, x: Tensor, a_stacked: tuple[Tensor, ...], b_stacked: tuple[Tensor, ...], *rest: Any, **_: Any
) -> None:
    """Add each adapter's update to its own rows of `y`.

    Args:
        self: vLLM's wrapper.
        y: [T, out], changed in place.
        x: [T, in].
        a_stacked: [slots, 1, rank, in] for each slice of the output.
        b_stacked: [slots, 1, slice, rank] for each slice of the output.
        rest: vLLM's scale, 1 in practice since scaling is in B, and the width of each slice.
    """
    scale, widths = rest[:2]
    y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
    for slot, rows in self.twinkle_rows:
        x_RI = x[rows].to(a_stacked[0].dtype)
        begin = 0
        for a, b, width in zip(a_stacked, b_stacked, widths, strict=True):
            update_RO = (x_RI @ a[slot, 0].t()) @ b[slot, 0, :width].t()
            if scale != 1.0:
                update_RO *= scale
            y[rows, begin : begin + width] += update_RO.to(y.dtype)
            begin += width
