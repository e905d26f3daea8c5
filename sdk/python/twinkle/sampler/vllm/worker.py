"""Our side of vLLM's workers: methods that the engine calls in each of them, between two steps.

vLLM mixes the class into its own worker. Problems come back as text and never as exceptions: an
exception in a worker may end the engine for everybody.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from twinkle.sampler.vllm import patches
from twinkle.sampler.vllm.adapters import MappedAdapter, build_model, is_whole
from twinkle.sampler.vllm.plans import Misfit, PlanBook, map_file, read_layout
from twinkle.sampler.vllm.watchdog import end_with_owner

end_with_owner()
patches.apply()


_RELOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError, AssertionError)
"""What vLLM's loaders fail with."""


class TwinkleWorker:
    """Adapters and base weights from memory."""

    def twinkle_add_adapter(self, lora_id: int, path: str, layout: bytes) -> str:
        """Keep an adapter; put it into a slot if one is free.

        Args:
            lora_id: vLLM's number for it, new.
            path: a file with its tensors; it may go when this returns.
            layout: what lies where in it.

        Returns:
            What is wrong with the adapter; empty: nothing. Then it is kept until it is removed.
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
        manager._registered_adapters[lora_id] = model  # noqa: SLF001 - add_adapter would pack what is packed
        if None in manager.lora_index_to_id:
            manager.activate_adapter(lora_id)
        return ''

    def twinkle_remove_adapter(self, lora_id: int) -> None:
        """Forget an adapter; unknown ones are no error."""
        self._twinkle_manager().remove_adapter(lora_id)

    def twinkle_adapters(self) -> dict[str, list[int]]:
        """Return the numbers of the adapters that are kept, and of those in slots."""
        manager = self._twinkle_manager()
        slots = [lora_id for lora_id in manager.lora_index_to_id if lora_id is not None]
        return {'kept': sorted(manager.list_adapters()), 'in_slots': sorted(slots)}

    def twinkle_replace_base(self, path: str, layout: bytes) -> str:
        """Replace the base model's weights; adapters stay.

        Args:
            path: a file with every tensor of the checkpoint; it may go when this returns.
            layout: what lies where in it.

        Returns:
            What went wrong; empty: nothing. Otherwise the weights are undefined.
        """
        try:
            places, _, size_bytes = read_layout(layout)
            buffer = map_file(path, size_bytes)
            self._twinkle_reload(weights_iterator=_tensors(places, buffer))
        except _RELOAD_ERRORS as error:
            return f'{type(error).__name__}: {error}'
        return ''

    def twinkle_restore(self) -> str:
        """Read the base model's weights from its folder again; adapters stay.

        Returns:
            What went wrong; empty: nothing. Otherwise the weights are undefined.
        """
        try:
            self._twinkle_reload()
        except _RELOAD_ERRORS as error:
            return f'{type(error).__name__}: {error}'
        return ''

    def _twinkle_reload(self, **given: Any) -> None:
        """Have vLLM load weights, and have everything that it made of the old ones made anew; adapters stay."""
        worker: Any = self
        kept = list(self._twinkle_manager().list_adapters().items())
        worker.reload_weights(**given)
        patches.pack_heads(worker.model_runner.get_model())
        self._twinkle_keep(kept)

    def _twinkle_keep(self, kept: Any) -> None:
        """Take back the adapters that vLLM dropped with the old weights; no slot is trusted."""
        manager = self._twinkle_manager()
        patches.forget_slots(manager)
        for lora_id, model in kept:
            manager._registered_adapters[lora_id] = model  # noqa: SLF001 - as above

    def _twinkle_manager(self) -> Any:
        worker: Any = self
        return worker.model_runner.lora_manager._adapter_manager  # noqa: SLF001 - vLLM has no other way

    def _twinkle_plans(self) -> PlanBook:
        worker: Any = self
        manager = self._twinkle_manager()
        book = getattr(worker, 'twinkle_book', None)
        if book is None or book.manager is not manager:
            book = worker.twinkle_book = PlanBook(manager)
        return book


def _tensors(places: Any, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, place in places.items():
        yield name, place.view(buffer)
