"""Patches of vLLM 0.32. No upstream issues are known for these defects. Review the patches with each new version.

* On a CPU, `cpu_lora` computes LoRA. Embeddings and heads have none: on heads, it breaks log-probabilities of prompts.
* On a CPU, a reload leaves a tied head with a packed copy of the old embeddings. The patch packs the head again.
* On a CPU, blocks of keys and values are cleared before use, and states of generators are restored after steps of
  incomplete prompts. vLLM would reset an offset that these generators do not have.
* Mapped adapters are copied into slots by one batched copy. Structured output has time limits and can be continued.
* If one request in a step selects the tokens whose log-probabilities are returned, the sampler omits the most likely
  tokens of all other requests. The patch keeps these tokens.
* Both model runners record requested embeddings of prompts. The file that connects workers is beside the sockets.
"""

from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import numpy as np
import vllm
from torch import Tensor
from torch.nn.functional import pad
from vllm import envs
from vllm.lora import model_manager
from vllm.lora.punica_wrapper import punica_cpu
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase

from twinkle.sampler.vllm import cpu_lora, embeddings
from twinkle.sampler.vllm.adapter_slots import MappedAdapter, Slots
from twinkle.sampler.vllm.forms import FormBudget, started_tokens

PATCHED_VERSIONS = ('0.32.',)
"""Prefixes of the vLLM versions that the patches were written for."""


class UnknownVllm(RuntimeError):
    """The installed vLLM is not a version that the patches were written for."""


def apply() -> None:
    """Apply the patches in this process. Applying them again has no effect.

    Raises:
        UnknownVllm: the installed version was not tested with the patches.
    """
    if not vllm.__version__.startswith(PATCHED_VERSIONS):
        raise UnknownVllm(
            f'vLLM {vllm.__version__} is not supported; install a version that starts with {PATCHED_VERSIONS}'
        )
    model_manager.get_supported_lora_modules = _linear_modules
    model_manager.LoRAModelManager.activate_adapter = _activate_adapter
    XgrammarGrammar.accept_tokens = _accept_tokens
    XgrammarGrammar.fill_bitmask = _fill_bitmask
    StructuredOutputManager._create_grammar = _create_grammar  # noqa: SLF001 - no public name exists
    Sampler.forward = _sample
    Sampler.gather_specific_token_logprobs = _gather_chosen
    WorkerBase.__init__ = _start_worker
    GPUModelRunner._bookkeeping_sync = _record_step  # noqa: SLF001 - no public name exists
    PromptLogprobsWorker.add_request = _add_request
    PromptLogprobsWorker.remove_request = _remove_request
    PromptLogprobsWorker.compute_prompt_token_id_logprobs = _compute_prompt_scores
    if current_platform.is_cpu():
        KVCacheConfig.needs_kv_cache_zeroing = property(_is_cleared)
        punica_cpu.PunicaWrapperCPU.update_metadata = cpu_lora.update_metadata
        punica_cpu.PunicaWrapperCPU.add_lora_linear = cpu_lora.add_lora_linear


_supported_lora_modules: Callable[[Any], list[str]] = model_manager.get_supported_lora_modules
_stock_activate_adapter: Callable[..., bool] = model_manager.LoRAModelManager.activate_adapter
_stock_accept_tokens: Callable[..., bool] = XgrammarGrammar.accept_tokens
_stock_fill_bitmask: Callable[..., None] = XgrammarGrammar.fill_bitmask
_stock_sample: Callable[..., Any] = Sampler.forward
_stock_gather_chosen: Callable[..., Any] = Sampler.gather_specific_token_logprobs
_stock_start_worker: Callable[..., None] = WorkerBase.__init__
_stock_record_step: Callable[..., Any] = GPUModelRunner._bookkeeping_sync  # noqa: SLF001 - no public name exists
_stock_add_request: Callable[..., None] = PromptLogprobsWorker.add_request
_stock_remove_request: Callable[..., None] = PromptLogprobsWorker.remove_request
_stock_prompt_scores: Callable[..., Any] = PromptLogprobsWorker.compute_prompt_token_id_logprobs
_stock_create_grammar: Callable[..., Any] = StructuredOutputManager._create_grammar  # noqa: SLF001 - no public name exists


def discard_slot_records(manager: Any) -> None:
    """Discard the record of the slots' contents, so that every slot is filled again."""
    manager.twinkle_slots = Slots(manager)
    cpu_lora.discard_factors(manager)


def pack_heads(model: Any) -> None:
    """Pack the weights of a model's heads again after a reload, replacing packed copies of the old weights."""
    for module in model.modules():
        method = getattr(module, 'quant_method', None)
        if isinstance(module, ParallelLMHead) and isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)


def _activate_adapter(self: Any, lora_id: int) -> bool:
    """Copy an adapter that has no slot into a free slot. vLLM has freed a slot before the call."""
    adapter = self._registered_adapters[lora_id]
    if not isinstance(adapter, MappedAdapter):
        if lora_id not in self._active_adapters:
            # vLLM may overwrite a slot whose contents are recorded.
            discard_slot_records(self)
        return _stock_activate_adapter(self, lora_id)
    if lora_id in self._active_adapters:
        return False
    slot = self.lora_index_to_id.index(None)
    if not hasattr(self, 'twinkle_slots'):
        discard_slot_records(self)
    cpu_lora.discard_factors(self, slot)
    self.twinkle_slots.fill(slot, adapter)
    self._active_adapters[lora_id] = None
    self.lora_index_to_id[slot] = lora_id
    return True


def _sample(self: Any, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
    """Sample. Record how many most likely tokens a request of this step needs at most, and the states of generators."""
    self.twinkle_top_count = sampling_metadata.max_num_logprobs or 0
    if not logits.is_cuda:
        self.twinkle_states = {row: generator.get_state() for row, generator in sampling_metadata.generators.items()}
    return _stock_sample(self, logits, sampling_metadata, *args, **kwargs)


def _start_worker(
    self: Any, vllm_config: Any, local_rank: int, rank: int, distributed_init_method: str, **kwargs: Any
) -> None:
    """Create a worker. The file that connects the workers of an engine is placed in the folder of sockets.

    vLLM creates the file in the temporary folder, and leaves the file there when its processes are killed.
    """
    if distributed_init_method.startswith('file://'):
        name = PurePath(distributed_init_method).name
        distributed_init_method = f'file://{envs.VLLM_RPC_BASE_PATH}/{name}'
    _stock_start_worker(self, vllm_config, local_rank, rank, distributed_init_method, **kwargs)


def _record_step(self: Any, scheduler_output: Any, sampled: Any, logits: Any, hidden_TD: Tensor, *args: Any) -> Any:
    """Record the embeddings and the results of a step.

    On a CPU, requests whose prompts are incomplete keep the states of generators of before the step.
    """
    embeddings.record_v1(self, scheduler_output, hidden_TD)
    batch = self.input_batch
    incomplete = np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs]).tolist()
    is_kept = current_platform.is_cpu()
    kept = {row: batch.generators.pop(row) for row in incomplete if is_kept and row in batch.generators}
    for row, generator in kept.items():
        generator.set_state(self.sampler.twinkle_states[row])
    try:
        return _stock_record_step(self, scheduler_output, sampled, logits, hidden_TD, *args)
    finally:
        batch.generators.update(kept)


def _add_request(self: Any, request_id: str, index: int, params: Any) -> None:
    """Begin a request, and keep the key of the embedding that it needs."""
    _stock_add_request(self, request_id, index, params)
    if key := embeddings.key_of(params):
        _keys_of(self)[request_id] = key


def _remove_request(self: Any, request_id: str) -> None:
    """End a request."""
    _stock_remove_request(self, request_id)
    _keys_of(self).pop(request_id, None)


def _compute_prompt_scores(self: Any, logits_of: Any, hidden_TD: Tensor, batch: Any, prompt_lengths: Any) -> Any:
    """Record the embeddings of the prompts that a step completed, and compute vLLM's scores of prompts."""
    embeddings.record_v2(_keys_of(self), batch, prompt_lengths, hidden_TD)
    return _stock_prompt_scores(self, logits_of, hidden_TD, batch, prompt_lengths)


def _keys_of(worker: Any) -> dict[str, str]:
    """Return the keys of the embeddings that the requests of a V2 model runner need."""
    if not hasattr(worker, 'twinkle_embedding_keys'):
        worker.twinkle_embedding_keys = {}
    return worker.twinkle_embedding_keys


def _gather_chosen(self: Any, logprobs_RV: Tensor, chosen: dict[int, list[int]], sampled_R: Tensor) -> Any:
    """Gather the chosen tokens of the rows in `chosen`, and the most likely tokens of the other rows.

    Legend: R rows of logits, V vocabulary size.
    """
    gathered = _stock_gather_chosen(self, logprobs_RV, chosen, sampled_R)
    others = [row for row in range(len(logprobs_RV)) if row not in chosen]
    if gathered is None or not others or self.twinkle_top_count < 1:
        return gathered
    best = self.gather_logprobs(logprobs_RV[others], self.twinkle_top_count, token_ids=sampled_R[others])
    width = best.logprobs.shape[1]
    missing = (0, max(width - gathered.logprobs.shape[1], 0))
    token_ids = pad(gathered.logprob_token_ids, missing)
    logprobs = pad(gathered.logprobs, missing, value=float('-inf'))
    token_ids[others, :width], logprobs[others, :width] = best.logprob_token_ids, best.logprobs
    return LogprobsTensors(token_ids, logprobs, gathered.selected_token_ranks)


def _budget_of(grammar: Any) -> FormBudget:
    if not hasattr(grammar, 'twinkle_budget'):
        grammar.twinkle_budget = FormBudget()
    return grammar.twinkle_budget


def _accept_tokens(self: Any, request_id: str, tokens: list[int]) -> bool:
    """Advance the form by tokens, or reject them if the form has cost too much."""
    budget = _budget_of(self)
    with budget.spending(len(tokens)):
        is_accepted = _stock_accept_tokens(self, request_id, tokens)
    return is_accepted and not budget.is_exhausted


def _fill_bitmask(self: Any, bitmask: Tensor, index: int) -> None:
    """Compute the tokens that may follow, and charge the cost."""
    with _budget_of(self).spending():
        _stock_fill_bitmask(self, bitmask, index)


def _create_grammar(self: Any, request: Any) -> Any:
    """Create a request's form, advanced by the tokens that another engine sampled."""
    grammar = _stock_create_grammar(self, request)
    started = started_tokens(request.sampling_params, request.prompt_token_ids)
    if started and not grammar.accept_tokens(request.request_id, started):
        raise ValueError('the tokens sampled so far do not match the form')
    return grammar


def _is_cleared(_: KVCacheConfig) -> bool:
    """Return True, so that vLLM clears blocks of keys and values before assigning them to a sequence.

    On a CPU, attention multiplies the unused part of a block by 0, and 0 times NaN is NaN. A request with NaN weights
    would therefore leave NaN in blocks that later requests reuse, and their results would be NaN.
    """
    return True


def _linear_modules(model: Any) -> list[str]:
    """Return vLLM's list of LoRA modules without embeddings and heads."""
    embeddings = {name for module in model.modules() for name in (getattr(module, 'embedding_modules', None) or ())}
    return [name for name in _supported_lora_modules(model) if name not in embeddings]
