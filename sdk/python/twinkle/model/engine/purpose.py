"""What one adapter runs a batch for, and what its loss and metrics therefore ask of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.data_format import InputFeature
from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.engine.results import ForwardOptions
from twinkle.processor import FeatureNeeds, ignored_streams


@dataclass(frozen=True)
class Purpose:
    """An adapter, how its batch is run, and whether its gradient is wanted."""

    state: AdapterState
    options: ForwardOptions
    is_training: bool

    @property
    def feature_needs(self) -> FeatureNeeds:
        """What the features are packed for."""
        return FeatureNeeds.of_loss(
            self.state.loss,
            more_streams=self._metric_streams,
            are_weightless_kept=self.options.are_weightless_labels_kept,
        )

    def is_needed(self, output: str) -> bool:
        """Whether the loss or a metric reads that output of the pass."""
        readers = (self.state.loss, *self.state.metrics(is_training=self.is_training))
        return any(output in reader.required_outputs for reader in readers)

    def warnings(self, features: Sequence[InputFeature]) -> tuple[str, ...]:
        """Say which streams of the features nothing reads."""
        names = ignored_streams(features, self.state.loss, more_streams=self._metric_streams)
        return tuple(f'features[].{name}: {type(self.state.loss).__name__} does not read it' for name in names)

    @property
    def _metric_streams(self) -> list[str]:
        metrics = self.state.metrics(is_training=self.is_training)
        return [name for metric in metrics for name in metric.optional_streams]
