"""Checks of the arguments that remote and in-process datasets share, and their conversion to the contract."""

import inspect
import logging
from collections.abc import Mapping
from typing import Any, cast

from twinkle.api.data.v1 import dataset_pb2
from twinkle_client.convert.config import component_name

_log = logging.getLogger('twinkle_client')
_HINTS: dict[str, tuple[Any, ...]] = {
    'batched': (None, True),
    'batch_size': (None,),
    'keep_in_memory': (None,),
    'load_from_cache_file': (None, False),
    'num_proc': (None, 0, 1),
    'desc': (None,),
}
"""Options of the library's methods, with the values that match the server's behavior. Other values log a warning."""


def row_format(name: str | None) -> dataset_pb2.RowFormat.ValueType:
    """Return the row format with a name; with None, the server recognizes the format.

    Raises:
        ValueError: The name is unknown.
    """
    if name is None:
        return dataset_pb2.ROW_FORMAT_UNSPECIFIED
    known = {key.removeprefix('ROW_FORMAT_').lower(): value for key, value in dataset_pb2.RowFormat.items()}
    del known['unspecified']
    if name not in known:
        raise ValueError(f'format: unknown format {name!r}; use one of {", ".join(known)}')
    return known[name]


def check_hints(options: Mapping[str, Any]) -> None:
    """Log a warning for each option that has no effect on the server.

    Raises:
        TypeError: An option is unknown.
    """
    unknown = sorted(set(options) - set(_HINTS))
    if unknown:
        raise TypeError(f'unknown options {unknown}; known options are {sorted(_HINTS)}')
    for name, value in options.items():
        if value not in _HINTS[name]:
            _log.warning('%s=%r has no effect on the data service', name, value)


def component_of(component: Any, init_args: Mapping[str, Any] | None) -> tuple[str, Mapping[str, Any]]:
    """Return name and constructor arguments of a component given by name, class or instance.

    Raises:
        TypeError: The component is a function, lacks an attribute with the name of an argument, or is an instance with
            `init_args`.
    """
    if isinstance(component, str | type):
        return component_name(component), init_args or {}
    kind = cast(type[Any], type(component))
    if inspect.isroutine(component):
        raise TypeError('functions cannot be sent; pass the name of a preprocessor that the server has')
    if init_args:
        raise TypeError(f'init_args cannot be combined with an instance; pass {kind.__name__} as a name or class')
    arguments: dict[str, Any] = {}
    for name in inspect.signature(kind).parameters:
        attributes = [attribute for attribute in (name, f'_{name}') if hasattr(component, attribute)]
        if not attributes:
            raise TypeError(f'{kind.__name__} has no attribute {name}; pass {kind.__name__!r} with init_args')
        value = getattr(component, attributes[0])
        if value is not None:
            arguments[name] = value
    return kind.__name__, arguments
