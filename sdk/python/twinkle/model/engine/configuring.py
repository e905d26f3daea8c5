"""Engine methods that configure the training of an adapter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from twinkle.loss import build_loss
from twinkle.metric import METRICS
from twinkle.model.engine.adapter_state import ConfiguredMetric
from twinkle.model.engine.adapters import AdapterTable, check_accumulation
from twinkle.model.engine.optimization import ComponentChoice, Optimization
from twinkle.model.engine.value_head import ValueHead
from twinkle.model.errors import InvalidArgument
from twinkle.nn import FullWeights
from twinkle.processor import PROCESSORS


class Configuring(AdapterTable):
    """Replaces optimizer, schedule, loss, processor and metrics. A refused call changes nothing."""

    def set_optimizer(self, adapter_id: str, optimizer: Any, /, **options: Any) -> None:
        """Replace the optimizer, given by name or class; its state is new and the schedule is removed.

        Raises:
            UnknownComponent: the name is unknown.
            InvalidComponentOptions: an option is unknown or out of range.
        """
        state = self.adapter(adapter_id)
        choice = ComponentChoice(optimizer, options)
        state.replace_optimization(Optimization.begin(choice, state.named_parameters()))

    def set_lr_scheduler(self, adapter_id: str, scheduler: Any, /, **options: Any) -> None:
        """Replace the schedule, given by name or class; for errors see `set_optimizer`."""
        state = self.adapter(adapter_id)
        choice = ComponentChoice(scheduler, options)
        state.optimization = state.optimization.scheduled(choice, state.named_parameters())

    def set_loss(self, adapter_id: str, loss: Any, /, **options: Any) -> None:
        """Replace the loss, given by name, plugin id, class, instance or function.

        A loss that needs a value head adds one to the adapter. The head remains if the loss is replaced.

        Raises:
            UnknownComponent, InvalidComponentOptions, PluginRefused, HubError: see `twinkle.loss.build_loss`.
            InvalidArgument: the loss needs a value head, and the weights of a full-parameter run are sharded.
        """
        state = self.adapter(adapter_id)
        built = build_loss(loss, **options)
        if 'values' in built.required_outputs and state.value_head is None:
            if isinstance(state.weights, FullWeights) and state.weights.is_sharded:
                raise InvalidArgument(
                    'a full-parameter run with fsdp ranks does not support losses with a value head; use dp_size alone'
                )
            state.add_value_head(ValueHead(self.model.config.hidden_size, device=self.model.device))
        state.loss, state.loss_choice = built, _choice(loss, built, options)

    def set_processor(self, adapter_id: str, processor: Any, /, **options: Any) -> None:
        """Replace the input processor; for arguments and errors see `ComponentRegistry.build`."""
        state = self.adapter(adapter_id)
        built = PROCESSORS.build(processor, options)
        state.processor, state.processor_choice = built, _choice(processor, built, options)

    def set_gradient_accumulation_steps(self, adapter_id: str, steps: int) -> None:
        """Set the number of batches per optimizer step.

        Raises:
            InvalidArgument: the number is below 1.
        """
        check_accumulation(steps)
        self.adapter(adapter_id).gradient_accumulation_steps = steps

    def add_metric(self, adapter_id: str, metric: Any, /, *, is_training: bool = True, **options: Any) -> None:
        """Add a metric of training or of forward-only batches; for errors see `ComponentRegistry.build`."""
        state = self.adapter(adapter_id)
        built = METRICS.build(metric, options)
        used = ConfiguredMetric(built, _choice(metric, built, options))
        if is_training:
            state.metrics_in_training += (used,)
        else:
            state.metrics_in_evaluation += (used,)

    @contextmanager
    def all_or_nothing(self, adapter_id: str) -> Iterator[None]:
        """Undo all configuration changes of the block if a change fails."""
        with self.adapter(adapter_id).restoring_configuration():
            yield


def _choice(component: Any, built: object, options: dict[str, Any]) -> ComponentChoice:
    """Return the name and options of a component, or its class if it was not given by name."""
    return ComponentChoice(component if isinstance(component, str) else type(built), options)
