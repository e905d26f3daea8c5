"""The critic of one process and one device: a trainer whose runs learn values."""

from typing import Any

from twinkle.model.transformers_model import TransformersModel
from twinkle.model.verbs.handle import WHOLE_MODEL


class TransformersValueModel(TransformersModel):
    """A causal language model with a scalar value head: the critic of PPO.

    Without an adapter the whole model is trained, head included: the first verb that is about a run begins one by the
    name 'default', to which the model is then leased. An adapter that is added before that is a critic of LoRA
    weights. Either has `PPOValueLoss` from the start and a head that is zero, so that all values are 0 before it
    learns; the backbone is not changed by the head alone. Values come with every forward verb.

    A policy and a critic on one base model are cheaper: two adapters of a `MultiLoraTransformersModel`, one with
    `set_loss('PPOValueLoss')`.

    Args:
        model_id: a hub id or a folder.
        options: of `TransformersModel`; the whole model can be trained with `mixed_precision='no'` alone.

    Raises:
        NotSupportedYet, ModelNotFound: as `TransformersModel`.
    """

    def add_adapter_to_model(
        self,
        adapter_name: str,
        config_or_dir: Any = None,
        *,
        full_parameters: bool = False,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        """Add a critic; arguments and errors as of `TransformersModel`."""
        super().add_adapter_to_model(
            adapter_name,
            config_or_dir,
            full_parameters=full_parameters,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )
        self.set_loss('PPOValueLoss', adapter_name=adapter_name)

    def _adapter(self, adapter_name: str | None) -> str:
        if not self.engine.adapter_ids and adapter_name in (None, WHOLE_MODEL):
            self.add_adapter_to_model(WHOLE_MODEL, full_parameters=True)
        return super()._adapter(adapter_name)
