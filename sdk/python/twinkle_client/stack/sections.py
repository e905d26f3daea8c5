"""Checks of the services' sections in a stack's configuration file, before any service starts."""

import difflib
import importlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args


def check_sections(sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Check the given settings of each service with the service's own configuration class.

    Fields that `twinkle up` fills in may be absent.

    Raises:
        ValueError: A field is unknown or has an invalid value; the message names it and similar known fields.
    """
    problems = [problem for service, section in sections.items() for problem in _problems(service, section)]
    if problems:
        raise ValueError('; '.join(problems))


def _problems(service: str, section: Mapping[str, Any]) -> list[str]:
    # The services are installed by an extra, and not with the client alone.
    module = importlib.import_module(f'twinkle_services.{service}.config')
    return problems_of(service, getattr(module, f'{service.capitalize()}Config'), section)


def problems_of(service: str, config_class: Any, section: Mapping[str, Any]) -> list[str]:
    """Return the problems of a section; required fields may be absent.

    Args:
        service: Name of the section, for messages.
        config_class: The service's configuration, a pydantic model.
        section: Given settings.
    """
    try:
        config_class.model_validate(dict(section))
    except ValueError as error:
        errors: list[dict[str, Any]] = getattr(error, 'errors', list)()
        # An error without a location compares fields that `twinkle up` may not have filled in yet.
        wrong = [item for item in errors if item['loc'] and item['type'] != 'missing']
        return [_text(service, config_class, item) for item in wrong]
    return []


def _text(service: str, config_class: Any, item: Mapping[str, Any]) -> str:
    path = '.'.join(map(str, (service, *item['loc'])))
    if item['type'] != 'extra_forbidden':
        return f'{path}: {item["msg"].removeprefix("Value error, ")}'
    known = _fields_at(config_class, item['loc'][:-1])
    return f'{path}: unknown field; {suggestion(str(item["loc"][-1]), known)}'


def suggestion(name: str, known: Collection[str]) -> str:
    """Return the second half of a message: the known names similar to an unknown name, or all known names."""
    similar = difflib.get_close_matches(name, known, n=3)
    return f'did you mean {" or ".join(similar)}?' if similar else f'known fields are {", ".join(sorted(known))}'


def _fields_at(config_class: Any, place: Sequence[str | int]) -> set[str]:
    """Return the names of the fields at a location in a configuration; empty if the names are not fixed."""
    annotation = config_class
    for name in place:
        fields = {key: field for model in _models_in(annotation) for key, field in model.model_fields.items()}
        # A name that is not a field is a key or an index of a mapping or list of models.
        annotation = fields[name].annotation if name in fields else annotation
    return {name for model in _models_in(annotation) for name in model.model_fields}


def _models_in(annotation: Any) -> Iterator[Any]:
    """Yield the configuration classes in a type such as `X`, `X | None`, `list[X]` or `dict[str, X]`."""
    if hasattr(annotation, 'model_fields'):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def with_defaults(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's settings of a sampler's engine, with defaults for absent settings and engine arguments."""
    merged = {**defaults, **own}
    if 'engine_args' in defaults and isinstance(merged['engine_args'], Mapping):
        merged['engine_args'] = {**defaults['engine_args'], **merged['engine_args']}
    return merged
