"""Descriptions of the fields of a configuration, for `--help-fields` and the documentation site.

The meaning of a field is the docstring below it, so every description has one source.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_TYPE_NAMES = {
    'Any': 'any value',
    'JsonValue': 'JSON value',
    'NoneType': 'unset',
    'Path': 'path',
    'PositiveFloat': 'number',
    'bool': 'boolean',
    'float': 'number',
    'int': 'integer',
    'str': 'text',
    'timedelta': 'duration',
}
_BOUNDS = {
    'ge': 'at least',
    'gt': 'above',
    'le': 'at most',
    'lt': 'below',
    'min_length': 'length at least',
    'pattern': 'matching',
}


@dataclass(frozen=True)
class FieldDescription:
    """A field of a configuration, or of one of its sections."""

    path: str
    """Path of the field, such as `mesh.dp`."""
    kind: str
    """Type in words, with the bounds of the value."""
    default: str
    """Default as YAML; 'required' for a field without a default."""
    explanation: str
    """Text of the docstring, on one line."""


def describe_fields(config_class: type[BaseModel], *, prefix: str = '') -> Iterator[FieldDescription]:
    """Yield the fields of a configuration in the order of their definition; a section is replaced by its fields."""
    explanations = _field_docstrings(config_class)
    for name, field in config_class.model_fields.items():
        section = _section_of(field.annotation)
        if section is not None:
            yield from describe_fields(section, prefix=f'{prefix}{name}.')
            continue
        yield FieldDescription(
            f'{prefix}{name}', kind=_kind_of(field), default=_default_of(field), explanation=explanations.get(name, '')
        )


def help_text(config_class: type[BaseModel]) -> str:
    """Return the descriptions of all fields, for a terminal."""
    lines: list[str] = []
    for field in describe_fields(config_class):
        lines.append(f'{field.path}: {field.kind}, default {field.default}'.replace('default required', 'required'))
        lines += textwrap.wrap(
            field.explanation, width=100, initial_indent='    ', subsequent_indent='    ', break_on_hyphens=False
        )
    return '\n'.join(lines)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the class of a section; None if the field is a single value, a list or a mapping."""
    if get_origin(annotation) in {Union, UnionType}:
        options = [item for item in get_args(annotation) if item is not NoneType]
        return _section_of(options[0]) if len(options) == 1 else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _kind_of(field: FieldInfo) -> str:
    bounds = [
        f'{words} {_text_of(getattr(bound, name))}'
        for bound in field.metadata
        for name, words in _BOUNDS.items()
        if getattr(bound, name, None) is not None and getattr(bound, name) != timedelta()
    ]
    return ', '.join([_type_name(field.annotation), *bounds])


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return ' or '.join(map(repr, arguments))
    if origin in {Union, UnionType}:
        return ' or '.join(map(_type_name, arguments))
    if origin in {tuple, list, frozenset}:
        return f'list of {_type_name(arguments[0])}'
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f'mapping of {_type_name(arguments[0])} to {_type_name(arguments[1])}'
    name = getattr(annotation, '__name__', str(annotation))
    return _TYPE_NAMES.get(name, name)


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return 'required'
    return _text_of(field.get_default(call_default_factory=True))


def _text_of(value: object) -> str:
    """Return a value as YAML, except that a duration has a unit and None is the word 'unset'."""
    if value is None:
        return 'unset'
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        return f'{int(seconds) if seconds.is_integer() else seconds} s'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list | frozenset):
        return f'[{", ".join(map(str, cast("tuple[object, ...]", value)))}]'
    return "''" if value == '' else str(value)


def _field_docstrings(config_class: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field of a class and its bases, on one line."""
    found: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        body = definition.body if isinstance(definition, ast.ClassDef) else []
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = ' '.join(str(text.value.value).split())
    return found
