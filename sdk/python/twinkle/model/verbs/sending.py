"""Methods that export weights in memory, for samplers."""

from twinkle.checkpoint_engine import BaseSource, PackedState, pack_state
from twinkle.model.verbs.handle import ModelHandle
from twinkle.nn import FullWeights, UnsupportedModel, merged_parameters, tensor_view_of


class SendingVerbs(ModelHandle):
    """Export methods, as `twinkle.checkpoint_engine.CheckpointEngineManager` requires of a trainer."""

    @property
    def base_source(self) -> BaseSource:
        """Source of the frozen base weights."""
        return BaseSource(model_folder=str(self._folder.resolve()), dtype=self.engine.model.dtype_name)

    def chosen_adapter(self, *, adapter_name: str | None = None) -> str:
        """Return `adapter_name` if the adapter exists, or the name of the only adapter if no name is given.

        Raises:
            UnknownAdapter: the adapter does not exist.
            NotSupportedYet: there is no adapter.
            InvalidArgument: there are several adapters and no name was given.
        """
        return self._adapter(adapter_name)

    def export_weights(self, *, adapter_name: str | None = None, merge_lora: bool = False) -> PackedState:
        """Copy the current weights of an adapter.

        If the base model is sharded, every process must call it.

        Args:
            adapter_name: optional while there is one adapter.
            merge_lora: whether to export the base model with the merged adapter. A full-parameter run always exports
                the base model's weights.

        Returns:
            The weights as a packed state; its bytes are a copy.

        Raises:
            UnknownAdapter, NotSupportedYet, InvalidArgument: see `chosen_adapter`.
            UnsupportedModel: the adapter cannot be merged, because it updates a head that is tied to the embeddings,
                or because the weights of the base model are stored in four bits.
        """
        weights = self.engine.adapter(self._adapter(adapter_name)).weights
        if isinstance(weights, FullWeights):
            return self.export_base()
        if merge_lora:
            self._check_exportable()
            tensors, config = merged_parameters(self.engine.model, weights), None
        else:
            tensors, config = weights.peft_state(), weights.config
        views = {name: tensor_view_of(tensor) for name, tensor in tensors.items()}
        return pack_state(views, base_model=self.model_id, lora_config=config)

    def export_base(self) -> PackedState:
        """Copy all current weights of the base model; tied weights are copied once.

        If the base model is sharded, every process must call it.

        Raises:
            UnsupportedModel: the weights are stored in four bits.
        """
        self._check_exportable()
        views = {name: tensor_view_of(tensor) for name, tensor in self.engine.model.base_state()}
        return pack_state(views, base_model=self.model_id, lora_config=None)

    def _check_exportable(self) -> None:
        if self.engine.model.is_quantized:
            raise UnsupportedModel('weights in four bits cannot be exported; load the model without quantization')
