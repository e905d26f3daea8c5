"""The verbs that say how an adapter is trained."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from twinkle.loss import build_loss
from twinkle.metric import METRICS
from twinkle.model.engine.adapter_state import MetricInUse
from twinkle.model.engine.adapters import AdapterTable, check_accumulation
from twinkle.model.engine.optimization import ComponentChoice, Optimization
from twinkle.model.engine.value_head import ValueHead
from twinkle.processor import PROCESSORS


class Configuring(AdapterTable):
    """Replaces optimizer, schedule, loss, processor and metrics. What is refused changed nothing."""

    def set_optimizer(self, adapter_id: str, optimizer: Any, /, **options: Any) -> None:
        """Replace the optimizer by one given by name or class; its state and the schedule begin anew.

        Raises:
            UnknownComponent: the name is not known.
            InvalidComponentOptions: an option is unknown or out of range.
        """
        state = self.adapter(adapter_id)
        state.optimization = Optimization.begin(ComponentChoice(optimizer, options), state.named_parameters())

    def set_lr_scheduler(self, adapter_id: str, scheduler: Any, /, **options: Any) -> None:
        """Replace the schedule; raises as `set_optimizer`."""
        state = self.adapter(adapter_id)
        choice = ComponentChoice(scheduler, options)
        state.optimization = state.optimization.scheduled(choice, state.named_parameters())

    def set_loss(self, adapter_id: str, loss: Any, /, **options: Any) -> None:
        """Replace the loss by one given by name, class, instance or function; raises as `set_optimizer`.

        A loss that learns values gives the adapter a value head, which it then keeps.
        """
        state = self.adapter(adapter_id)
        built = build_loss(loss, **options)
        if 'values' in built.required_outputs and state.value_head is None:
            state.add_value_head(ValueHead(self.model.config.hidden_size, device=self.model.device))
        state.loss, state.loss_choice = built, _choice(loss, built, options)

    def set_processor(self, adapter_id: str, processor: Any, /, **options: Any) -> None:
        """Replace the input processor; raises as `set_optimizer`."""
        state = self.adapter(adapter_id)
        built = PROCESSORS.build(processor, options)
        state.processor, state.processor_choice = built, _choice(processor, built, options)

    def set_gradient_accumulation_steps(self, adapter_id: str, steps: int) -> None:
        """Set how many batches make a step.

        Raises:
            InvalidArgument: fewer than 1.
        """
        check_accumulation(steps)
        self.adapter(adapter_id).gradient_accumulation_steps = steps

    def add_metric(self, adapter_id: str, metric: Any, /, *, is_training: bool = True, **options: Any) -> None:
        """Report one more metric, of training or of forward-only batches; raises as `set_optimizer`."""
        state = self.adapter(adapter_id)
        built = METRICS.build(metric, options)
        used = MetricInUse(built, _choice(metric, built, options))
        if is_training:
            state.metrics_in_training += (used,)
        else:
            state.metrics_in_evaluation += (used,)

    @contextmanager
    def all_or_nothing(self, adapter_id: str) -> Iterator[None]:
        """Undo every change of configuration in the block if one of them is refused."""
        with self.adapter(adapter_id).undoing_configuration():
            yield


def _choice(asked: Any, built: object, options: dict[str, Any]) -> ComponentChoice:
    """Return how a component was asked for: a name as it was given, else the class."""
    return ComponentChoice(asked if isinstance(asked, str) else type(built), options)
