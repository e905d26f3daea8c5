"""An adapter's training configuration, into the engine and out of it."""

from typing import Any

from services.kit.errors import InvalidField, UnknownComponent
from services.model.domain.training_config import Component, LossChoice, TrainingConfig
from twinkle.model.engine import AdapterState, TrainerEngine
from twinkle.template import template_names

_TEMPLATE_WARNING = (
    'training_config.template: kept, and without effect until batches can be given as chats; give features'
)


def configure(engine: TrainerEngine, adapter_id: str, config: TrainingConfig) -> tuple[str, ...]:
    """Change what `config` sets, all of it or nothing; return what the owner should know.

    Raises:
        UnknownComponent, InvalidComponentOptions, InvalidField: nothing was changed.
    """
    if config.patches:
        raise InvalidField('training_config.patches', 'must be empty: patches are not built yet')
    if config.template is not None and config.template.name not in template_names():
        name, known = config.template.name, template_names()
        raise UnknownComponent('training_config.template.name', kind='template', name=name, known=known)
    with engine.all_or_nothing(adapter_id):
        if config.optimizer is not None:
            engine.set_optimizer(adapter_id, config.optimizer.name, **config.optimizer.options)
        if config.lr_scheduler is not None:
            engine.set_lr_scheduler(adapter_id, config.lr_scheduler.name, **config.lr_scheduler.options)
        if config.loss is not None:
            engine.set_loss(adapter_id, config.loss.name, **_loss_options(config.loss))
        if config.processor is not None:
            engine.set_processor(adapter_id, config.processor.name, **config.processor.options)
        if config.gradient_accumulation_steps is not None:
            engine.set_gradient_accumulation_steps(adapter_id, config.gradient_accumulation_steps)
        for metric in config.metrics:
            engine.add_metric(adapter_id, metric.name, **metric.options)
    return (_TEMPLATE_WARNING,) if config.template is not None else ()


def training_config_of(state: AdapterState, asked: TrainingConfig) -> TrainingConfig:
    """Return the configuration in use, defaults filled in.

    Args:
        state: of the adapter.
        asked: what was set last; names what the engine does not keep.
    """
    optimizer = {**state.optimizer.defaults, **state.optimizer_choice.options}
    scheduler = state.scheduler_choice
    loss_options = {key: value for key, value in state.loss_choice.options.items() if key != 'reduction'}
    return TrainingConfig(
        optimizer=Component(name=state.optimizer_choice.name, options=_said(optimizer)),
        lr_scheduler=None if scheduler is None else Component(name=scheduler.name, options=scheduler.options),
        loss=LossChoice(
            name=state.loss_choice.name,
            options=loss_options,
            is_mean=state.loss_choice.options.get('reduction', 'mean') == 'mean',
        ),
        gradient_accumulation_steps=state.gradient_accumulation_steps,
        processor=Component(name=type(state.processor).__name__),
        template=asked.template,
        metrics=tuple(Component(name=type(metric).__name__) for metric in state.train_metrics),
    )


def _loss_options(loss: LossChoice) -> dict[str, Any]:
    return {**loss.options, 'reduction': 'mean' if loss.is_mean else 'sum'}


def _said(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out what torch itself calls unset."""
    return {name: value for name, value in options.items() if value is not None}
