"""JSON schemas of tool functions, derived from their signatures, and validation of call arguments."""

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from twinkle.rollout.errors import InvalidArguments, InvalidTool

_PLAIN: Mapping[Any, str] = {str: 'string', bool: 'boolean', int: 'integer', float: 'number', dict: 'object'}
_KINDS: Mapping[str, tuple[type, ...]] = {
    'string': (str,),
    'boolean': (bool,),
    'integer': (int,),
    'number': (int, float),
    'object': (dict,),
    'array': (list,),
    'null': (type(None),),
}
_ARGUMENT = re.compile(r'^\s+(\w+)(?: \([^)]*\))?:\s*(.+)$')

Schema = dict[str, Any]


def parameters_of(function: Callable[..., Any], *, name: str) -> Schema:
    """Return the JSON schema of a function's parameters.

    Every parameter needs an annotation: `str`, `int`, `float`, `bool`, `list`, `dict`, `Literal`, `X | None`, and
    lists and dicts of these. The descriptions are read from the `Args:` section of the docstring.

    Args:
        function: function to describe.
        name: name of the tool, for messages.

    Raises:
        InvalidTool: a parameter has no supported annotation or cannot be passed by name, or an annotation names an
            unknown type.
    """
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise InvalidTool(name, f'an annotation cannot be read: {error}') from error
    descriptions = _descriptions(inspect.getdoc(function) or '')
    properties: Schema = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidTool(name, f'parameter {parameter.name} cannot be passed by name; make it a named parameter')
        if parameter.name not in hints:
            raise InvalidTool(name, f'parameter {parameter.name} has no type; annotate it')
        schema = _schema_of(hints[parameter.name], where=f'parameter {parameter.name}', name=name)
        if parameter.name in descriptions:
            schema['description'] = descriptions[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return {'type': 'object', 'properties': properties, 'required': required, 'additionalProperties': False}


def summary_of(function: Callable[..., Any]) -> str:
    """Return the part of a docstring before its first section, such as `Args:`."""
    text = inspect.getdoc(function) or ''
    return re.split(r'\n\s*(?:Args|Returns|Raises):', text)[0].strip()


def check_arguments(arguments: Any, schema: Schema) -> dict[str, Any]:
    """Validate the arguments of a call and return a copy.

    Raises:
        InvalidArguments: `arguments` is not an object, or an argument is unknown, missing, of the wrong type or not
            one of the allowed values. The message names the argument.
    """
    if not isinstance(arguments, dict):
        raise InvalidArguments(f'arguments must be an object, got {type(arguments).__name__}')
    given = cast('dict[Any, Any]', arguments)
    properties = schema.get('properties', {})
    unknown = sorted(str(name) for name in given if name not in properties)
    if unknown and schema.get('additionalProperties', True) is False:
        raise InvalidArguments(f'arguments {unknown} are unknown; known are {sorted(properties)}')
    missing = [name for name in schema.get('required', []) if name not in given]
    if missing:
        raise InvalidArguments(f'arguments {missing} are missing')
    for name, value in given.items():
        _check(value, properties.get(name, {}), path=str(name))
    return dict(given)


def _schema_of(hint: Any, *, where: str, name: str) -> Schema:
    origin, inner = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return {'type': _PLAIN[hint]}
    if hint is list:
        return {'type': 'array'}
    if origin is Literal:
        return {'enum': list(inner)}
    if origin in (list, Sequence):
        return {'type': 'array', 'items': _schema_of(inner[0], where=where, name=name)}
    if origin in (dict, Mapping) and inner[0] is str:
        return {'type': 'object', 'additionalProperties': _schema_of(inner[1], where=where, name=name)}
    if origin in (Union, types.UnionType):
        known = [_schema_of(kind, where=where, name=name) for kind in inner if kind is not type(None)]
        return {'anyOf': [*known, *([{'type': 'null'}] if type(None) in inner else [])]}
    raise InvalidTool(name, f'{where} has the unsupported type {hint!r}; use str, int, float, bool, list or dict')


def _check(value: Any, schema: Schema, *, path: str) -> None:
    if 'anyOf' in schema:
        _check_any(value, schema['anyOf'], path=path)
        return
    if 'enum' in schema and value not in schema['enum']:
        raise InvalidArguments(f'{path} must be one of {schema["enum"]}, got {value!r}')
    kind = str(schema.get('type', ''))
    if kind in _KINDS and not _has_type(value, kind):
        raise InvalidArguments(f'{path} must be of type {kind}, got {value!r}')
    if kind == 'array':
        for index, item in enumerate(value):
            _check(item, schema.get('items', {}), path=f'{path}[{index}]')
    if kind == 'object' and isinstance(schema.get('additionalProperties'), dict):
        for key, item in value.items():
            _check(item, schema['additionalProperties'], path=f'{path}.{key}')


def _has_type(value: Any, kind: str) -> bool:
    # In Python a bool is an int; in JSON schemas it is not.
    return isinstance(value, _KINDS[kind]) and (not isinstance(value, bool) or kind == 'boolean')


def _check_any(value: Any, choices: list[Schema], *, path: str) -> None:
    for choice in choices:
        try:
            _check(value, choice, path=path)
        except InvalidArguments:
            continue
        return
    wanted = ' or '.join(str(choice.get('type', choice.get('enum'))) for choice in choices)
    raise InvalidArguments(f'{path} must be {wanted}, got {value!r}')


def _descriptions(text: str) -> dict[str, str]:
    """Return the first line of each parameter's description in the `Args:` section of a docstring."""
    _, found, section = text.partition('Args:\n')
    lines = section.split('\n\n')[0].splitlines() if found else []
    matches = [match for match in map(_ARGUMENT.match, lines) if match]
    return {match.group(1): match.group(2).strip() for match in matches}
