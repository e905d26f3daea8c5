"""Conversion of adapter and training configurations."""

from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat, TypeVar, cast

from google.protobuf import json_format, struct_pb2

from twinkle.api.model.v1 import training_config_pb2 as pb
from twinkle.data_format import LoraConfig
from twinkle.data_format.lora import in_effect

_Value = TypeVar('_Value')

_PEFT_DEFAULTS: dict[str, tuple[Any, ...]] = {
    'bias': ('none',),
    'corda_config': (None,),
    'eva_config': (None,),
    'exclude_modules': (None,),
    'fan_in_fan_out': (False,),
    'init_lora_weights': (True,),
    'layer_replication': (None,),
    'layers_pattern': (None,),
    'layers_to_transform': (None,),
    'modules_to_save': (None,),
    'trainable_token_indices': (None,),
    'use_bdlora': (None,),
    'use_dora': (False,),
}
"""Fields of peft's configuration that the contract lacks, with the values that have no effect."""
_AVERAGED = frozenset({'CrossEntropyLoss', 'SoftCrossEntropyLoss'})
"""Losses whose default reduction is 'mean'."""
_REDUCTIONS = {'sum': pb.LOSS_REDUCTION_SUM, 'mean': pb.LOSS_REDUCTION_MEAN}


def lora_config(config: Any) -> pb.LoraConfig:
    """Return the message of a `LoraConfig` of peft or of `twinkle`, or of a mapping of its fields.

    Raises:
        TypeError: A key of the mapping is not a field, or the object has no rank.
        ValueError: A value is out of range or not supported, or the configuration belongs to another PEFT method.
    """
    lora = LoraConfig.of(config)
    if not isinstance(config, LoraConfig | Mapping):
        for name, neutral in _PEFT_DEFAULTS.items():
            value = getattr(config, name, neutral[0])
            if value and value not in neutral:
                raise ValueError(f'LoraConfig.{name} = {value!r} is not supported; leave it unset')
    targets = (lora.target_modules,) if isinstance(lora.target_modules, str) else lora.target_modules
    return pb.LoraConfig(
        lora_rank=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=targets,
        is_rank_stabilized=lora.use_rslora,
        rank_pattern=_pattern(lora.rank_pattern, 'rank_pattern'),
        alpha_pattern=_pattern(lora.alpha_pattern, 'alpha_pattern'),
        seed=lora.seed,
    )


def _pattern(pattern: Mapping[str, _Value], field: str) -> dict[str, _Value]:
    """Convert a pattern of peft to a map of the contract.

    In a pattern, the first matching name applies. In the map, the longest matching name applies.
    """
    found = in_effect(pattern)
    if len(found) < len(pattern):
        hidden = next(name for name in pattern if name not in found)
        raise ValueError(
            f'{field}[{hidden!r}] has no effect, because an earlier name is a suffix of it; '
            'put the longer name first, or remove it'
        )
    return found


def full_parameter_config(*, names: bool | Sequence[str]) -> pb.FullParameterConfig | None:
    """Return the selection of the base model's parameters to train, or None for no selection.

    Args:
        names: Names to match against the parts of a parameter's path. True selects all parameters, False none.

    Raises:
        ValueError: `names` is an empty list.
    """
    if isinstance(names, bool):
        return pb.FullParameterConfig() if names else None
    targets = [names] if isinstance(names, str) else list(names)
    if not targets:
        # The contract defines an empty list as all parameters.
        raise ValueError('full_parameters must name at least one module; pass True to train all parameters')
    return pb.FullParameterConfig(target_modules=targets)


def optimizer_config(name: Any, options: Mapping[str, Any]) -> pb.OptimizerConfig:
    """Return the configuration of an optimizer with its arguments, including `lr` and `groups`.

    Raises:
        TypeError: `name` is neither a string nor a class.
        ValueError: A group is not a mapping with a pattern, `lr` is not a number, or an argument cannot be represented
            in JSON.
    """
    others = {key: value for key, value in options.items() if key not in ('lr', 'groups')}
    return pb.OptimizerConfig(
        name=component_name(name),
        learning_rate=_rate(options.get('lr'), 'lr'),
        options=struct(others, field='optimizer'),
        groups=[_group(group, f'groups[{index}]') for index, group in enumerate(options.get('groups') or ())],
    )


def _rate(value: Any, field: str) -> float | None:
    if value is not None and (isinstance(value, bool | str) or not isinstance(value, SupportsFloat)):
        raise ValueError(f'{field} must be a number, got {value!r}')
    return None if value is None else float(value)


def _group(group: Any, field: str) -> pb.ParameterGroup:
    if not isinstance(group, Mapping) or 'pattern' not in group:
        raise ValueError(f"{field} must be a mapping such as {{'pattern': 'lora_B', 'lr': 1e-3}}, got {group!r}")
    given = cast(Mapping[str, Any], group)
    others = {key: value for key, value in given.items() if key not in ('pattern', 'lr')}
    return pb.ParameterGroup(
        pattern=given['pattern'],
        learning_rate=_rate(given.get('lr'), f'{field}.lr'),
        options=struct(others, field=field),
    )


def scheduler_config(name: Any, options: Mapping[str, Any]) -> pb.SchedulerConfig:
    """Return the configuration of a learning rate schedule with its arguments.

    Raises:
        TypeError: `name` is neither a string nor a class.
        ValueError: An argument cannot be represented in JSON.
    """
    return pb.SchedulerConfig(name=component_name(name), options=struct(options, field='lr_scheduler'))


def loss_config(name: Any, options: Mapping[str, Any], *, reduction: str | None) -> pb.LossConfig:
    """Return the configuration of a loss with its arguments.

    Raises:
        TypeError: `name` is neither a string nor a class.
        ValueError: `reduction` is not 'mean', 'sum' or None, or an argument cannot be represented in JSON.
    """
    loss = component_name(name)
    if reduction is None and loss in _AVERAGED:
        reduction = 'mean'
    if reduction is not None and reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    number = pb.LOSS_REDUCTION_UNSPECIFIED if reduction is None else _REDUCTIONS[reduction]
    return pb.LossConfig(name=loss, options=struct(options, field='loss'), reduction=number)


def component_config(name: Any, options: Mapping[str, Any]) -> pb.ComponentConfig:
    """Return the configuration of a processor, template, metric or patch with its arguments.

    Raises:
        TypeError: `name` is neither a string nor a class.
        ValueError: An argument cannot be represented in JSON.
    """
    return pb.ComponentConfig(name=component_name(name), options=struct(options, field=component_name(name)))


def component_name(component: Any) -> str:
    """Return the name of a component given by name or class.

    Raises:
        TypeError: `component` is neither a string nor a class. Only names are sent to the server.
    """
    if isinstance(component, str):
        return component
    if isinstance(component, type):
        return component.__name__
    raise TypeError(f'pass {type(component).__name__} as a name or class, with its arguments as keyword arguments')


def struct(values: Mapping[str, Any], *, field: str) -> struct_pb2.Struct:
    """Return JSON-like values as a message.

    Raises:
        ValueError: A value cannot be represented in JSON.
    """
    try:
        return json_format.ParseDict(_plain(values), struct_pb2.Struct())
    except (json_format.ParseError, TypeError) as error:
        raise ValueError(
            f'{field}: arguments must be numbers, strings, booleans, lists and mappings: {error}'
        ) from None


def plain_value(message: struct_pb2.Struct | struct_pb2.Value) -> Any:
    """Return a message's JSON-like value, with integral floats as integers."""
    return _with_integers(json_format.MessageToDict(message))


def _with_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in cast(list[Any], value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain(value: Any) -> Any:
    """Convert tuples to lists and numpy scalars to numbers, recursively."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast(list[Any], value)]
    return value.item() if hasattr(value, 'item') else value
