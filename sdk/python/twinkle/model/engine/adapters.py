"""The adapters there are."""

from dataclasses import replace

import torch

from twinkle.data_format import LoraConfig
from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.errors import AdapterExists, InvalidArgument, UnknownAdapter
from twinkle.nn import LoraWeights, PackedCausalLM


class AdapterTable:
    """Makes, finds and forgets adapters on one frozen model.

    Args:
        model: shared by all adapters.
    """

    def __init__(self, model: PackedCausalLM) -> None:
        self.model = model
        self._adapters: dict[str, AdapterState] = {}

    @property
    def adapter_ids(self) -> tuple[str, ...]:
        """The adapters there are, oldest first."""
        return tuple(self._adapters)

    def adapter(self, adapter_id: str) -> AdapterState:
        """Return an adapter's state; to be read only.

        Raises:
            UnknownAdapter: there is none.
        """
        try:
            return self._adapters[adapter_id]
        except KeyError:
            raise UnknownAdapter(adapter_id) from None

    def create_adapter(
        self, adapter_id: str, config: LoraConfig, *, gradient_accumulation_steps: int = 1
    ) -> AdapterState:
        """Make an adapter with fresh weights, AdamW with torch's defaults, mean cross-entropy and no schedule.

        Raises:
            AdapterExists: the id is taken.
            UnknownTargetModules: the configuration names layers the model does not have.
            InvalidArgument: a number is out of range.
        """
        if adapter_id in self._adapters:
            raise AdapterExists(adapter_id)
        check_accumulation(gradient_accumulation_steps)
        seed = config.seed if config.seed is not None else int(torch.randint(2**31, ()))
        weights = LoraWeights.create(
            self.model.layers, replace(config, seed=seed), seed=seed, device=str(self.model.device), is_trainable=True
        )
        state = AdapterState.create(adapter_id, weights, gradient_accumulation_steps=gradient_accumulation_steps)
        self._adapters[adapter_id] = state
        return state

    def delete_adapter(self, adapter_id: str) -> None:
        """Forget an adapter.

        Raises:
            UnknownAdapter: there is none.
        """
        self.adapter(adapter_id)
        del self._adapters[adapter_id]


def check_accumulation(steps: int) -> None:
    """Refuse a number of batches that make no step.

    Raises:
        InvalidArgument: fewer than 1.
    """
    if steps < 1:
        raise InvalidArgument(f'gradient_accumulation_steps must be at least 1, got {steps}')
