"""Checks of the services' sections in a stack's configuration file, before any service starts."""

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any


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
    # The services are installed with their extra, and not with the client alone.
    module = importlib.import_module(f'services.{service}.config')
    config_class: Any = getattr(module, f'{service.capitalize()}Config')
    try:
        config_class.model_validate(dict(section))
    except ValueError as error:
        errors: list[dict[str, Any]] = getattr(error, 'errors', list)()
        # An error without a place compares several fields, and some of them may not be known yet.
        wrong = [item for item in errors if item['loc'] and item['type'] != 'missing']
        return [_text(service, config_class, item) for item in wrong]
    return []


def _text(service: str, config_class: Any, item: Mapping[str, Any]) -> str:
    path = '.'.join(map(str, (service, *item['loc'])))
    if item['type'] != 'extra_forbidden':
        return f'{path}: {item["msg"]}'
    known = _fields_at(config_class, item['loc'][:-1])
    similar = difflib.get_close_matches(str(item['loc'][-1]), known, n=3)
    hint = f'did you mean {" or ".join(similar)}?' if similar else f'known fields are {", ".join(sorted(known))}'
    return f'{path}: unknown field; {hint}'


def _fields_at(config_class: Any, place: Sequence[str | int]) -> list[str]:
    """Return the names of the fields of a section inside a configuration; empty if it is not a fixed set."""
    for name in place:
        field = getattr(config_class, 'model_fields', {}).get(name)
        config_class = field.annotation if field else None
    return list(getattr(config_class, 'model_fields', {}))
