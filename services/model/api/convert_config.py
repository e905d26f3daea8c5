"""Converts training configurations. Every error names its field."""

from collections.abc import Sequence
from typing import Any

from twinkle.api.model.v1 import training_config_pb2 as wire
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.json_values import dict_from_struct, struct_of
from twinkle_services.model.domain.training_config import Component, LossChoice, TrainingConfig

_RATE, _GROUPS, _PATTERN = 'lr', 'groups', 'pattern'
"""The engine's names for an optimizer's learning rate and parameter groups, and for the pattern of a group."""

_REDUCTIONS: 'dict[bool | None, wire.LossReduction.ValueType]' = {
    None: wire.LOSS_REDUCTION_UNSPECIFIED,
    False: wire.LOSS_REDUCTION_SUM,
    True: wire.LOSS_REDUCTION_MEAN,
}
_IS_MEAN = {reduction: is_mean for is_mean, reduction in _REDUCTIONS.items()}


def training_config_from_proto(message: wire.TrainingConfig, field: str) -> TrainingConfig:
    """Convert a change of the training configuration; unset fields become None.

    Raises:
        InvalidField: A value is out of range or in the wrong field, or a name or pattern is missing.
    """
    steps = message.gradient_accumulation_steps if message.HasField('gradient_accumulation_steps') else None
    if steps is not None and steps < 1:
        raise InvalidField(f'{field}.gradient_accumulation_steps', f'must be at least 1, got {steps}')
    return TrainingConfig(
        optimizer=optimizer_from_proto(message.optimizer, f'{field}.optimizer')
        if message.HasField('optimizer')
        else None,
        lr_scheduler=_named(message.lr_scheduler, f'{field}.lr_scheduler')
        if message.HasField('lr_scheduler')
        else None,
        loss=loss_from_proto(message.loss, f'{field}.loss') if message.HasField('loss') else None,
        gradient_accumulation_steps=steps,
        processor=_named(message.processor, f'{field}.processor') if message.HasField('processor') else None,
        template=_named(message.template, f'{field}.template') if message.HasField('template') else None,
        metrics=_all_named(message.metrics, f'{field}.metrics'),
        evaluation_metrics=_all_named(message.evaluation_metrics, f'{field}.evaluation_metrics'),
        patches=_all_named(message.patches, f'{field}.patches'),
    )


def training_config_to_proto(config: TrainingConfig) -> wire.TrainingConfig:
    """Convert a training configuration to its message; None fields are left unset."""
    message = wire.TrainingConfig(gradient_accumulation_steps=config.gradient_accumulation_steps)
    if config.optimizer is not None:
        message.optimizer.CopyFrom(_optimizer_to_proto(config.optimizer))
    if config.lr_scheduler is not None:
        message.lr_scheduler.CopyFrom(
            wire.SchedulerConfig(name=config.lr_scheduler.name, options=struct_of(config.lr_scheduler.options))
        )
    if config.loss is not None:
        message.loss.CopyFrom(
            wire.LossConfig(
                name=config.loss.name,
                options=struct_of(config.loss.options),
                reduction=_REDUCTIONS[config.loss.is_mean],
            )
        )
    for name in ('processor', 'template'):
        component: Component | None = getattr(config, name)
        if component is not None:
            getattr(message, name).CopyFrom(_component_to_proto(component))
    message.metrics.extend(map(_component_to_proto, config.metrics))
    message.evaluation_metrics.extend(map(_component_to_proto, config.evaluation_metrics))
    message.patches.extend(map(_component_to_proto, config.patches))
    return message


def optimizer_from_proto(message: wire.OptimizerConfig, field: str) -> Component:
    """Convert an optimizer; its options include `lr` and `groups` if set.

    Raises:
        InvalidField: A value is out of range, the options contain a value that has a separate field, or a group lacks
            its pattern or has no option.
    """
    options = _rate_and_options(message, field)
    if _GROUPS in options:
        raise InvalidField(f'{field}.options.{_GROUPS}', 'must be unset; set the field groups instead')
    groups = [_group(group, f'{field}.groups[{index}]') for index, group in enumerate(message.groups)]
    if groups:
        options[_GROUPS] = groups
    return Component(name=message.name or 'AdamW', options=options)


def _group(message: wire.ParameterGroup, field: str) -> dict[str, Any]:
    if not message.pattern:
        raise InvalidField(f'{field}.pattern', 'must be set')
    options = _rate_and_options(message, field)
    if _PATTERN in options:
        raise InvalidField(f'{field}.options.{_PATTERN}', 'must be unset; set the field pattern instead')
    if not options:
        raise InvalidField(f'{field}.options', 'must have at least one option if learning_rate is unset')
    return {_PATTERN: message.pattern, **options}


def _rate_and_options(message: wire.OptimizerConfig | wire.ParameterGroup, field: str) -> dict[str, Any]:
    options = dict_from_struct(message.options)
    if _RATE in options:
        raise InvalidField(f'{field}.options.{_RATE}', 'must be unset; set the field learning_rate instead')
    if message.HasField('learning_rate'):
        rate = message.learning_rate
        if not 0.0 <= rate < float('inf'):
            raise InvalidField(f'{field}.learning_rate', f'must be at least 0 and finite, got {rate}')
        options[_RATE] = rate
    return options


def _optimizer_to_proto(optimizer: Component) -> wire.OptimizerConfig:
    options = dict(optimizer.options)
    groups = [dict(group) for group in options.pop(_GROUPS, ())]
    return wire.OptimizerConfig(
        name=optimizer.name,
        learning_rate=options.pop(_RATE, None),
        options=struct_of(options),
        groups=[
            wire.ParameterGroup(
                pattern=group.pop(_PATTERN), learning_rate=group.pop(_RATE, None), options=struct_of(group)
            )
            for group in groups
        ],
    )


def loss_from_proto(message: wire.LossConfig, field: str) -> LossChoice:
    """Convert the loss of an adapter or of one batch.

    Raises:
        InvalidField: The reduction is unknown, or the options contain a reduction.
    """
    if message.reduction not in _IS_MEAN:
        raise InvalidField(f'{field}.reduction', 'must be LOSS_REDUCTION_SUM or LOSS_REDUCTION_MEAN')
    options = dict_from_struct(message.options)
    if 'reduction' in options:
        raise InvalidField(f'{field}.options.reduction', 'must be unset; set the field reduction instead')
    return LossChoice(
        name=message.name or 'CrossEntropyLoss',
        options=options,
        is_mean=_IS_MEAN[message.reduction],
    )


def _named(message: wire.SchedulerConfig | wire.ComponentConfig, field: str) -> Component:
    if not message.name:
        raise InvalidField(f'{field}.name', 'must be set')
    return Component(name=message.name, options=dict_from_struct(message.options))


def _all_named(messages: Sequence[wire.ComponentConfig], field: str) -> tuple[Component, ...]:
    return tuple(_named(item, f'{field}[{index}]') for index, item in enumerate(messages))


def _component_to_proto(component: Component) -> wire.ComponentConfig:
    return wire.ComponentConfig(name=component.name, options=struct_of(component.options))
