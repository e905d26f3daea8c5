"""The extension of vLLM's workers: methods that the engine calls in every worker between two steps.

vLLM adds the class to the base classes of its worker. Methods return problems as text instead of raising them, because
an exception in a worker may stop the engine.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from twinkle.sampler.vllm import embeddings, patches
from twinkle.sampler.vllm.adapter_slots import MappedAdapter, build_model, is_whole
from twinkle.sampler.vllm.plans import Misfit, PlanCache, map_file, read_layout
from twinkle.sampler.vllm.watchdog import exit_with_owner
from twinkle.telemetry import gpu_memory

exit_with_owner()
patches.apply()


_RELOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError, AssertionError)
"""Errors that vLLM's loaders raise."""


class TwinkleWorker:
    """Loads adapters and base weights from memory."""

    def twinkle_add_adapter(self, lora_id: int, path: str, layout: bytes) -> str:
        """Register an adapter, and copy the adapter into a slot if a slot is free.

        Args:
            lora_id: new id of the adapter in vLLM.
            path: file with the adapter's tensors; the file may be deleted after the call.
            layout: description of the file from `layout_of`.

        Returns:
            The problem of the adapter, or '' if it was registered.
        """
        manager = self._twinkle_manager()
        try:
            plan = self._twinkle_plans().plan(layout)
            buffer = map_file(path, plan.size_bytes)
        except (Misfit, OSError) as error:
            return str(error) or type(error).__name__
        if is_whole(manager, plan):
            model = MappedAdapter(lora_id, plan, buffer)
        else:
            model = build_model(manager, plan, buffer, lora_id)
        manager._registered_adapters[lora_id] = model  # noqa: SLF001 - add_adapter would pack the layers again
        if None in manager.lora_index_to_id:
            manager.activate_adapter(lora_id)
        return ''

    def twinkle_remove_adapter(self, lora_id: int) -> None:
        """Remove an adapter. Unknown ids are ignored."""
        self._twinkle_manager().remove_adapter(lora_id)

    def twinkle_adapters(self) -> dict[str, list[int]]:
        """Return the ids of the registered adapters ('kept') and of the adapters in slots ('in_slots')."""
        manager = self._twinkle_manager()
        slots = [lora_id for lora_id in manager.lora_index_to_id if lora_id is not None]
        return {'kept': sorted(manager.list_adapters()), 'in_slots': sorted(slots)}

    def twinkle_replace_base(self, path: str, layout: bytes) -> str:
        """Replace the base weights. Adapters are kept.

        Args:
            path: file with all tensors of the checkpoint; the file may be deleted after the call.
            layout: description of the file from `layout_of`.

        Returns:
            The problem, after which the weights are undefined; '' on success.
        """
        try:
            locations, _, size_bytes = read_layout(layout)
            buffer = map_file(path, size_bytes)
            self._twinkle_reload(weights_iterator=_tensors(locations, buffer))
        except _RELOAD_ERRORS as error:
            return f'{type(error).__name__}: {error}'
        return ''

    def twinkle_restore(self) -> str:
        """Reload the base weights from the model folder. Adapters are kept.

        Returns:
            The problem, after which the weights are undefined; '' on success.
        """
        try:
            self._twinkle_reload()
        except _RELOAD_ERRORS as error:
            return f'{type(error).__name__}: {error}'
        return ''

    def twinkle_take_embedding(self, key: str) -> bytes:
        """Remove and return the float32 values of a recorded embedding; empty if this worker does not have it."""
        return embeddings.kept.take(key)

    def twinkle_device_memory(self) -> dict[str, int]:
        """Return the bytes of the memory of the worker's GPU by state; empty on a CPU."""
        worker: Any = self
        return gpu_memory(torch.cuda, str(worker.device))

    def _twinkle_reload(self, **given: Any) -> None:
        """Reload the base weights and recompute everything that vLLM derives from them. Adapters are kept."""
        worker: Any = self
        adapters = list(self._twinkle_manager().list_adapters().items())
        worker.reload_weights(**given)
        patches.pack_heads(worker.model_runner.get_model())
        self._twinkle_register(adapters)

    def _twinkle_register(self, adapters: Any) -> None:
        """Register the adapters that vLLM dropped with the old weights, and discard the record of the slots."""
        manager = self._twinkle_manager()
        patches.discard_slot_records(manager)
        for lora_id, model in adapters:
            manager._registered_adapters[lora_id] = model  # noqa: SLF001 - see twinkle_add_adapter

    def _twinkle_manager(self) -> Any:
        worker: Any = self
        return worker.model_runner.lora_manager._adapter_manager  # noqa: SLF001 - vLLM has no public accessor

    def _twinkle_plans(self) -> PlanCache:
        worker: Any = self
        manager = self._twinkle_manager()
        plan_cache = getattr(worker, 'twinkle_plan_cache', None)
        if plan_cache is None or plan_cache.manager is not manager:
            plan_cache = worker.twinkle_plan_cache = PlanCache(manager)
        return plan_cache


def _tensors(locations: Any, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, location in locations.items():
        yield name, location.view(buffer)
