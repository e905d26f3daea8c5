"""Verbs that give weights out in memory, for samplers."""

from twinkle.checkpoint_engine import BaseSource, PackedState, pack_state
from twinkle.model.verbs.handle import ModelHandle
from twinkle.nn import FullWeights, merged_parameters, tensor_view_of


class SendingVerbs(ModelHandle):
    """What `twinkle.checkpoint_engine.CheckpointEngineManager` asks of a trainer."""

    @property
    def base_source(self) -> BaseSource:
        """Where the frozen base weights come from."""
        return BaseSource(model_folder=str(self._folder.resolve()), dtype=self.engine.model.dtype_name)

    def chosen_adapter(self, *, adapter_name: str | None = None) -> str:
        """Return the adapter that is meant: the named one, or the only one.

        Raises:
            UnknownAdapter: there is none of that name.
            InvalidArgument: there are several and none is named.
        """
        return self._adapter(adapter_name)

    def export_weights(self, *, adapter_name: str | None = None, merge_lora: bool = False) -> PackedState:
        """Copy an adapter's weights as they are now.

        Args:
            adapter_name: may be left out while there is one adapter.
            merge_lora: the base model's weights with the adapter merged in, instead of the adapter. A run that
                trains the base model's own weights gives those in any case.

        Returns:
            The state; its bytes are a copy.

        Raises:
            UnknownAdapter: there is none of that name.
        """
        weights = self.engine.adapter(self._adapter(adapter_name)).weights
        if isinstance(weights, FullWeights):
            return self.export_base()
        if merge_lora:
            tensors, config = merged_parameters(self.engine.model, weights), None
        else:
            tensors, config = weights.peft_state(), weights.config
        views = {name: tensor_view_of(tensor) for name, tensor in tensors.items()}
        return pack_state(views, base_model=self.model_id, lora_config=config)

    def export_base(self) -> PackedState:
        """Copy the base model's own weights as they are now, all of them, tied ones once."""
        views = {name: tensor_view_of(tensor) for name, tensor in self.engine.model.base_parameters.items()}
        return pack_state(views, base_model=self.model_id, lora_config=None)
