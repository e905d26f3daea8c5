"""Purpose of a batch: its adapter, options and loss, and the outputs and streams that these need."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from twinkle.data_format import InputFeature
from twinkle.loss import LOSSES, Loss
from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.engine.results import ForwardOptions
from twinkle.model.errors import InvalidArgument
from twinkle.processor import FeatureNeeds, PackedBatch, ignored_streams


@dataclass(frozen=True)
class Purpose:
    """Adapter, options and mode of a batch."""

    state: AdapterState
    options: ForwardOptions
    is_training: bool
    own_loss: Loss | None = None
    """Loss of this batch only; None for the adapter's loss."""

    @property
    def loss(self) -> Loss:
        """Loss of the batch."""
        return self.state.loss if self.own_loss is None else self.own_loss

    @property
    def loss_name(self) -> str:
        """Name of the loss."""
        return self.state.loss_choice.name if self.own_loss is None else LOSSES.name_of(self.own_loss)

    @property
    def feature_needs(self) -> FeatureNeeds:
        """Labels and streams to pack."""
        needs = FeatureNeeds.of_loss(
            self.loss,
            more_streams=self._metric_streams,
            are_weightless_kept=self.options.are_weightless_labels_kept or self.loss.takes_every_label,
        )
        return replace(needs, is_pooled=needs.is_pooled or 'embeddings' in self.options.more_outputs)

    def check(self) -> None:
        """Refuse outputs that the adapter does not have.

        Raises:
            InvalidArgument: the batch needs values and the adapter has no value head.
        """
        if 'values' in self.loss.required_outputs and self.state.value_head is None:
            raise InvalidArgument(f'{self.loss_name} needs a value head; call set_loss with it first')
        if 'values' in self.options.more_outputs and self.state.value_head is None:
            raise InvalidArgument('the adapter has no value head; call set_loss with a loss that needs one first')

    def is_needed(self, output: str) -> bool:
        """Return whether the caller requested an output of the pass, or the loss or a metric reads it."""
        if output in self.options.more_outputs:
            return True
        readers = (self.loss, *self.state.metrics(is_training=self.is_training))
        return any(output in reader.required_outputs for reader in readers)

    def missing_streams(self, batch: PackedBatch) -> tuple[str, ...]:
        """Return the streams that the loss requires and the features do not have."""
        return tuple(name for name in self.loss.required_streams if name not in batch.streams)

    def warnings(self, features: Sequence[InputFeature], *, missing: Sequence[str] = ()) -> tuple[str, ...]:
        """Return warnings about streams that are not read, and about `missing` streams that the loss requires."""
        loss = type(self.loss).__name__
        names = ignored_streams(features, self.loss, more_streams=self._metric_streams)
        absent = tuple(f'no loss was calculated and metrics were not updated: {loss} needs {name}' for name in missing)
        return (*absent, *(f'features[].{name} is ignored: {loss} does not read it' for name in names))

    @property
    def _metric_streams(self) -> list[str]:
        metrics = self.state.metrics(is_training=self.is_training)
        return [name for metric in metrics for name in metric.optional_streams]
