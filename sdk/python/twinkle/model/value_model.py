"""Critic: a trainer whose adapters learn values."""

from typing import Any

from twinkle.model.transformers_model import TransformersModel
from twinkle.model.verbs.handle import WHOLE_MODEL


class TransformersValueModel(TransformersModel):
    """Causal language model with a scalar value head, the critic of PPO.

    Without an adapter, the whole model is trained, including the head. The first method that needs an adapter creates a
    full-parameter adapter named 'default'. If a LoRA adapter was added before, only this adapter and the head are
    trained. Both kinds of critic start with `PPOValueLoss` and a head of zeros, so all initial values are 0. Every
    forward method returns the values.

    A policy and a critic of the same base model need less memory if they are two adapters of one
    `MultiLoraTransformersModel`. In this case, call `set_loss('PPOValueLoss')` for the critic.

    Args:
        model_id: hub id or folder.
        options: arguments of `TransformersModel`; training the whole model requires `mixed_precision='no'`.

    Raises:
        NotSupportedYet, ValueError, UnsupportedModel, ImportError, HubError: see `TransformersModel`.
        InvalidArgument: the whole model is trained, and the mesh has `fsdp` ranks; raised when the adapter is created.
    """

    def add_adapter_to_model(
        self,
        adapter_name: str,
        config_or_dir: Any = None,
        *,
        full_parameters: bool = False,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        """Add a critic; for arguments and errors see `TransformersModel`."""
        super().add_adapter_to_model(
            adapter_name,
            config_or_dir,
            full_parameters=full_parameters,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )
        try:
            self.set_loss('PPOValueLoss', adapter_name=adapter_name)
        except BaseException:
            self.remove_adapter(adapter_name)
            raise

    def _adapter(self, adapter_name: str | None) -> str:
        if not self.engine.adapter_ids and adapter_name in (None, WHOLE_MODEL):
            self.add_adapter_to_model(WHOLE_MODEL, full_parameters=True)
        return super()._adapter(adapter_name)
