"""Table of the adapters on one model."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from twinkle.data_format import LoraConfig
from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.engine.owner import AdapterOwner
from twinkle.model.engine.pass_group import PassGroup, SoloPassGroup
from twinkle.model.errors import AdapterExists, InvalidArgument, ModelLeased, UnknownAdapter
from twinkle.nn import FullWeights, LoraWeights, PackedModel


class AdapterTable:
    """Creates, finds and deletes adapters on one shared model.

    Args:
        model: model shared by all adapters.
        group: ranks that have equal tables; None for this process alone.
    """

    def __init__(self, model: PackedModel, *, group: PassGroup | None = None) -> None:
        self.model = model
        self.group = SoloPassGroup() if group is None else group
        self._adapters: dict[str, AdapterState] = {}

    @property
    def adapter_ids(self) -> tuple[str, ...]:
        """Ids of all adapters, oldest first."""
        return tuple(self._adapters)

    def adapter(self, adapter_id: str) -> AdapterState:
        """Return an adapter's state; callers must not modify it.

        Raises:
            UnknownAdapter: the adapter does not exist.
        """
        try:
            return self._adapters[adapter_id]
        except KeyError:
            raise UnknownAdapter(adapter_id) from None

    def create_adapter(
        self, adapter_id: str, config: LoraConfig, *, gradient_accumulation_steps: int = 1
    ) -> AdapterState:
        """Create an adapter with new weights, AdamW with torch's defaults, mean cross-entropy and no schedule.

        Raises:
            AdapterExists: the id is in use.
            UnknownTargetModules: the configuration names layers that the model does not have.
            ExpertDropout: the configuration has dropout and targets experts.
            InvalidArgument: `gradient_accumulation_steps` is below 1.
            ModelLeased: a full-parameter adapter has leased the model.
        """
        self._check_free(adapter_id)
        check_accumulation(gradient_accumulation_steps)
        seed = config.seed if config.seed is not None else int(torch.randint(2**31, ()))
        weights = LoraWeights.create(
            self.model.targets, replace(config, seed=seed), seed=seed, device=str(self.model.device), is_trainable=True
        )
        state = AdapterState.create(
            adapter_id,
            weights,
            gradient_accumulation_steps=gradient_accumulation_steps,
            owner=self._next_owner(),
        )
        self._adapters[adapter_id] = state
        return state

    def create_full_adapter(
        self, adapter_id: str, target_modules: Sequence[str] = (), *, gradient_accumulation_steps: int = 1
    ) -> AdapterState:
        """Lease the model's weights to a full-parameter adapter. Deleting the adapter restores them.

        Args:
            adapter_id: id of the adapter, which must be the only adapter.
            target_modules: names matched against the dotted parts of each parameter's path; empty selects all.
            gradient_accumulation_steps: number of batches per optimizer step.

        Raises:
            ModelLeased: another adapter exists.
            AdapterExists, InvalidArgument: see `create_adapter`.
            UnknownParameters: a name matches no parameter.
            UnsupportedModel: the model does not support full-parameter training; see `FullWeights`.
        """
        self._check_free(adapter_id)
        if self._adapters:
            raise ModelLeased()
        check_accumulation(gradient_accumulation_steps)
        weights = FullWeights(self.model, target_modules)
        state = AdapterState.create(adapter_id, weights, gradient_accumulation_steps=gradient_accumulation_steps)
        self._adapters[adapter_id] = state
        return state

    def delete_adapter(self, adapter_id: str) -> None:
        """Delete an adapter; if it had leased the model's weights, they are restored.

        Raises:
            UnknownAdapter: the adapter does not exist.
        """
        weights = self.adapter(adapter_id).weights
        del self._adapters[adapter_id]
        if isinstance(weights, FullWeights):
            weights.release()

    def _next_owner(self) -> AdapterOwner | None:
        """Return the owner of a new LoRA adapter: the rank with the fewest parameters, or None for one process."""
        loads = [0] * self.group.size
        for state in self._adapters.values():
            if state.owner is not None:
                loads[state.owner.rank] += state.weights.parameter_count
        return self.group.owner(loads.index(min(loads)))

    def _check_free(self, adapter_id: str) -> None:
        if adapter_id in self._adapters:
            raise AdapterExists(adapter_id)
        if any(isinstance(state.weights, FullWeights) for state in self._adapters.values()):
            raise ModelLeased()


def check_accumulation(steps: int) -> None:
    """Validate a number of batches per step.

    Raises:
        InvalidArgument: the number is below 1.
    """
    if steps < 1:
        raise InvalidArgument(f'gradient_accumulation_steps must be at least 1, got {steps}')
