"""What one adapter runs a batch for, and what its loss and metrics therefore ask of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from twinkle.data_format import InputFeature
from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.engine.results import ForwardOptions
from twinkle.model.errors import InvalidArgument
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
        needs = FeatureNeeds.of_loss(
            self.state.loss,
            more_streams=self._metric_streams,
            are_weightless_kept=self.options.are_weightless_labels_kept,
        )
        return replace(needs, is_pooled=needs.is_pooled or 'embeddings' in self.options.more_outputs)

    def check(self) -> None:
        """Refuse outputs that the adapter does not have.

        Raises:
            InvalidArgument: values without a value head.
        """
        if 'values' in self.options.more_outputs and self.state.value_head is None:
            raise InvalidArgument('there are no values before a loss that learns them was set')

    def is_needed(self, output: str) -> bool:
        """Whether the caller asked for that output of the pass, or the loss or a metric reads it."""
        if output in self.options.more_outputs:
            return True
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
