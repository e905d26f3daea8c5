"""Converts a dataset's steps, and checks all their fields."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from twinkle.api.data.v1 import dataset_pb2
from twinkle.preprocessor import (
    ROW_FORMATS,
    PreprocessorError,
    build_filter,
    build_preprocessor,
    filter_names,
    preprocessor_names,
    refuse_paths,
)
from twinkle.template import template_names
from twinkle_services.data.domain import CheckStep, EncodeStep, FilterStep, MapStep, PackStep, Step, TemplateStep
from twinkle_services.kit.errors import InvalidField, UnknownComponent
from twinkle_services.kit.rpc.fields import base_model_from_proto
from twinkle_services.kit.rpc.json_values import dict_from_struct, struct_of
from twinkle_services.kit.rpc.message_bounds import MAX_LIST_ITEMS, check_options

Strategy = Literal['raise', 'left', 'right', 'split', 'delete']

_STRATEGIES: dict[int, Strategy] = {
    dataset_pb2.TRUNCATION_STRATEGY_UNSPECIFIED: 'raise',
    dataset_pb2.TRUNCATION_STRATEGY_RAISE: 'raise',
    dataset_pb2.TRUNCATION_STRATEGY_LEFT: 'left',
    dataset_pb2.TRUNCATION_STRATEGY_RIGHT: 'right',
    dataset_pb2.TRUNCATION_STRATEGY_SPLIT: 'split',
    dataset_pb2.TRUNCATION_STRATEGY_DELETE: 'delete',
}
_DEFAULT_TEMPLATE = 'Template'
_FORMAT_NAMES: dict[int, str] = {
    dataset_pb2.RowFormat.Value(f'ROW_FORMAT_{name.upper()}'): name for name in ROW_FORMATS
}


def steps_from_proto(steps: Sequence[dataset_pb2.DatasetStep]) -> tuple[Step, ...]:
    """Convert the steps of a request.

    Raises:
        InvalidField: There are too many steps, a step is empty, or an argument is invalid or too large.
        UnknownComponent: A preprocessor, filter or template is unknown.
    """
    if len(steps) > MAX_LIST_ITEMS:
        raise InvalidField('steps', f'must have at most {MAX_LIST_ITEMS} items, got {len(steps)}')
    for index, step in enumerate(steps):
        check_options(step, f'steps[{index}]')
    return tuple(_step_from_proto(step, f'steps[{index}]') for index, step in enumerate(steps))


def step_to_proto(step: Step) -> dataset_pb2.DatasetStep:
    match step:
        case MapStep():
            message = dataset_pb2.MapStep(preprocessor=step.preprocessor, init_args=struct_of(step.init_args))
            return dataset_pb2.DatasetStep(map=message)
        case FilterStep():
            message = dataset_pb2.FilterStep(filter=step.filter, init_args=struct_of(step.init_args))
            return dataset_pb2.DatasetStep(filter=message)
        case TemplateStep():
            return dataset_pb2.DatasetStep(set_template=_template_to_proto(step))
        case EncodeStep():
            message = dataset_pb2.EncodeStep(
                is_generation_prompt_added=step.is_generation_prompt_added, row_format=_format_to_proto(step.row_format)
            )
            return dataset_pb2.DatasetStep(encode=message)
        case PackStep():
            return dataset_pb2.DatasetStep(pack=dataset_pb2.PackStep())
        case CheckStep():
            message = dataset_pb2.CheckStep(row_format=_format_to_proto(step.row_format))
            return dataset_pb2.DatasetStep(check=message)


def _step_from_proto(step: dataset_pb2.DatasetStep, field: str) -> Step:
    match step.WhichOneof('step'):
        case 'map':
            arguments = dict_from_struct(step.map.init_args)
            _check_known(step.map.preprocessor, f'{field}.map.preprocessor', 'preprocessor', preprocessor_names())
            _check_arguments(build_preprocessor, step.map.preprocessor, arguments, f'{field}.map.init_args')
            return MapStep(preprocessor=step.map.preprocessor, init_args=arguments)
        case 'filter':
            arguments = dict_from_struct(step.filter.init_args)
            _check_known(step.filter.filter, f'{field}.filter.filter', 'filter', filter_names())
            _check_arguments(build_filter, step.filter.filter, arguments, f'{field}.filter.init_args')
            return FilterStep(filter=step.filter.filter, init_args=arguments)
        case 'set_template':
            return _template_from_proto(step.set_template, f'{field}.set_template')
        case 'encode':
            return EncodeStep(
                is_generation_prompt_added=step.encode.is_generation_prompt_added,
                row_format=_format_from_proto(step.encode.row_format, f'{field}.encode.row_format'),
            )
        case 'pack':
            return PackStep()
        case 'check':
            return CheckStep(row_format=_format_from_proto(step.check.row_format, f'{field}.check.row_format'))
        case _:
            raise InvalidField(field, 'must contain exactly one of map, filter, set_template, encode, pack and check')


def _format_from_proto(number: int, field: str) -> str | None:
    if number == dataset_pb2.ROW_FORMAT_UNSPECIFIED:
        return None
    if number not in _FORMAT_NAMES:
        raise InvalidField(field, f'must be one of {", ".join(_FORMAT_NAMES.values()).upper()}')
    return _FORMAT_NAMES[number]


def _format_to_proto(name: str | None) -> dataset_pb2.RowFormat.ValueType:
    return dataset_pb2.RowFormat.Value(f'ROW_FORMAT_{name.upper()}' if name else 'ROW_FORMAT_UNSPECIFIED')


def _template_from_proto(config: dataset_pb2.TemplateConfig, field: str) -> TemplateStep:
    name = config.name or _DEFAULT_TEMPLATE
    _check_known(name, f'{field}.name', 'template', template_names())
    strategy = _STRATEGIES.get(config.truncation_strategy)
    if strategy is None:
        raise InvalidField(f'{field}.truncation_strategy', 'must be one of RAISE, LEFT, RIGHT, SPLIT and DELETE')
    default = TemplateStep(base_model='')
    max_length = config.max_length if config.HasField('max_length') else default.max_length
    if max_length < 1:
        raise InvalidField(f'{field}.max_length', f'must be at least 1, got {max_length}')
    return TemplateStep(
        base_model=base_model_from_proto(config.base_model, f'{field}.base_model'),
        name=name,
        max_length=max_length,
        truncation_strategy=strategy,
        default_system=config.default_system if config.HasField('default_system') else None,
        is_thinking_enabled=config.is_thinking_enabled if config.HasField('is_thinking_enabled') else True,
    )


def _template_to_proto(step: TemplateStep) -> dataset_pb2.TemplateConfig:
    strategy = f'TRUNCATION_STRATEGY_{step.truncation_strategy.upper()}'
    return dataset_pb2.TemplateConfig(
        name=step.name,
        base_model=step.base_model,
        max_length=step.max_length,
        truncation_strategy=dataset_pb2.TruncationStrategy.Value(strategy),
        default_system=step.default_system,
        is_thinking_enabled=step.is_thinking_enabled,
    )


def _check_known(name: str, field: str, kind: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise UnknownComponent(field, kind, name, known)


def _check_arguments(build: Callable[..., Any], name: str, arguments: Mapping[str, Any], field: str) -> None:
    try:
        refuse_paths(arguments)
        build(name, arguments)
    except PreprocessorError as error:
        raise InvalidField(field, str(error)) from error
