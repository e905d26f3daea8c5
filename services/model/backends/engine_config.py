"""Applies training configurations to the engine and reads them back."""

import inspect
from typing import Any

from twinkle import component
from twinkle.loss import Loss, build_loss
from twinkle.model.engine import AdapterState, TrainerEngine
from twinkle.template import template_names
from twinkle_services.kit.errors import InvalidField, UnknownComponent
from twinkle_services.model.domain.training_config import Component, LossChoice, TrainingConfig

_REDUCTION = 'reduction'
"""Name of the constructor argument of losses with a configurable reduction."""
_TEMPLATE_WARNING = (
    'training_config.template: stored, but has no effect until batches of chats are supported; send features'
)
_REDUCTION_WARNING = 'training_config.loss.reduction: has no effect; {} scales its gradient itself'


def configure(engine: TrainerEngine, adapter_id: str, config: TrainingConfig) -> tuple[str, ...]:
    """Apply the settings of `config` atomically, and return warnings for the tenant.

    Raises:
        UnknownComponent, InvalidComponentOptions, InvalidField: The configuration is invalid; nothing changed.
    """
    if config.patches:
        raise InvalidField(
            'training_config.patches',
            'must be empty: the operator chooses the patches, because all tenants share the base model',
        )
    if config.template is not None and config.template.name not in template_names():
        name, known = config.template.name, template_names()
        raise UnknownComponent('training_config.template.name', kind='template', name=name, known=known)
    with engine.all_or_nothing(adapter_id):
        if config.optimizer is not None:
            engine.set_optimizer(adapter_id, config.optimizer.name, **config.optimizer.options)
        if config.lr_scheduler is not None:
            engine.set_lr_scheduler(adapter_id, config.lr_scheduler.name, **config.lr_scheduler.options)
        if config.loss is not None:
            engine.set_loss(adapter_id, config.loss.name, **_loss_options(config.loss, field='training_config.loss'))
        if config.processor is not None:
            engine.set_processor(adapter_id, config.processor.name, **config.processor.options)
        if config.gradient_accumulation_steps is not None:
            engine.set_gradient_accumulation_steps(adapter_id, config.gradient_accumulation_steps)
        for metric in config.metrics:
            engine.add_metric(adapter_id, metric.name, **metric.options)
        for metric in config.evaluation_metrics:
            engine.add_metric(adapter_id, metric.name, is_training=False, **metric.options)
    return _warnings(config)


def batch_loss(choice: LossChoice) -> Loss:
    """Build the loss that one batch uses instead of the adapter's loss.

    Raises:
        UnknownComponent, InvalidField: The loss or its options are invalid; field paths start with `loss`.
    """
    try:
        return build_loss(choice.name, **_loss_options(choice, field='loss'))
    except component.UnknownComponent as error:
        raise UnknownComponent('loss.name', kind='loss', name=error.name, known=error.known) from error
    except component.InvalidComponentOptions as error:
        raise InvalidField('loss.options', error.problem) from error


def training_config_of(state: AdapterState, requested: TrainingConfig) -> TrainingConfig:
    """Return the configuration in use, including defaults.

    Args:
        state: State of the adapter.
        requested: The last requested configuration, for settings that the engine does not store.
    """
    optimizer = {**state.optimizer.defaults, **state.optimizer_choice.options}
    loss_options = dict(state.loss_choice.options)
    reduction = loss_options.pop(_REDUCTION, None)
    if reduction is None and _has_reduction(state.loss):
        reduction = inspect.signature(type(state.loss)).parameters[_REDUCTION].default
    return TrainingConfig(
        optimizer=Component(name=state.optimizer_choice.name, options=_without_unset(optimizer)),
        lr_scheduler=None if state.scheduler_choice is None else _component(state.scheduler_choice),
        loss=LossChoice(
            name=state.loss_choice.name,
            options=loss_options,
            is_mean=None if reduction is None else reduction == 'mean',
        ),
        gradient_accumulation_steps=state.gradient_accumulation_steps,
        processor=_component(state.processor_choice),
        template=requested.template,
        metrics=tuple(_component(used.choice) for used in state.metrics_in_training),
        evaluation_metrics=tuple(_component(used.choice) for used in state.metrics_in_evaluation),
    )


def _loss_options(choice: LossChoice, *, field: str) -> dict[str, Any]:
    """Return the arguments of the loss, including its reduction if the loss has this option.

    Raises:
        UnknownComponent, InvalidComponentOptions: The loss or its options are invalid.
        InvalidField: The loss scales its gradient itself, so the mean cannot be requested.
    """
    loss = build_loss(choice.name, **choice.options)
    if _has_reduction(loss):
        return {**choice.options, _REDUCTION: 'mean' if choice.is_mean else 'sum'}
    if choice.is_mean:
        raise InvalidField(f'{field}.reduction', f'must be unset: {choice.name} scales its gradient itself')
    return dict(choice.options)


def _has_reduction(loss: object) -> bool:
    return _REDUCTION in inspect.signature(type(loss)).parameters


def _warnings(config: TrainingConfig) -> tuple[str, ...]:
    """Return warnings for the tenant about settings that have no effect."""
    loss = config.loss
    is_sum_requested = loss is not None and loss.is_mean is False
    found = [_TEMPLATE_WARNING] if config.template is not None else []
    if loss is not None and is_sum_requested and not _has_reduction(build_loss(loss.name, **loss.options)):
        found.append(_REDUCTION_WARNING.format(loss.name))
    return tuple(found)


def _component(choice: Any) -> Component:
    return Component(name=choice.name, options=dict(choice.options))


def _without_unset(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options whose values are not None; torch uses None for unset options."""
    return {name: value for name, value in options.items() if value is not None}
