"""Build a preprocessor, filter or stage from a name, a class or an object, and check its arguments."""

import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, cast

from twinkle.plugin import Plugin, is_plugin_id
from twinkle.preprocessor.base import DataFilter, Preprocessor
from twinkle.preprocessor.errors import InvalidArguments, UnknownPreprocessor

_PLUGIN_BASES: dict[str, type[Any]] = {'preprocessor': Preprocessor, 'filter': DataFilter}


def construct(given: Any, init_args: Mapping[str, Any] | None, known: Mapping[str, type[Any]], kind: str) -> Any:
    """Return the requested object; a preprocessor or filter that is given as an object is reset with `begin_pass`.

    Args:
        given: a name in `known`, the id of an allowed plugin, a class, an object or a function.
        init_args: arguments of the constructor; only for names and classes.
        known: classes by name.
        kind: word for error messages; plugins are supported only for 'preprocessor' and 'filter'.

    Raises:
        UnknownPreprocessor: the name is not known.
        InvalidArguments: the constructor does not accept the arguments, an object is given with arguments, or `given`
            is not callable.
        PluginRefused: plugins are not allowed, or the plugin does not contain exactly one class of this kind.
        HubError: the plugin cannot be downloaded.
    """
    if isinstance(given, str):
        if is_plugin_id(given) and kind in _PLUGIN_BASES:
            known = {given: Plugin.load_plugin(given, _PLUGIN_BASES[kind])}
        if given not in known:
            raise UnknownPreprocessor(f'unknown {kind} {given!r}; use one of {", ".join(sorted(known))}')
        given = known[given]
        check_types(given, init_args or {})
    if not isinstance(given, type):
        return _reset(given, init_args, kind)
    try:
        inspect.signature(given).bind(**(init_args or {}))
    except TypeError as error:
        raise InvalidArguments(f'{given.__name__}{inspect.signature(given)}: {error}') from error
    return given(**(init_args or {}))


def check_types(kind: type[Any], init_args: Mapping[str, Any]) -> None:
    """Check the types of constructor arguments, which may come from a remote client.

    Raises:
        InvalidArguments: an argument does not have the type of its parameter.
    """
    hints = typing.get_type_hints(kind.__init__)
    for name, value in init_args.items():
        hint = hints.get(name, Any)
        if not _fits(value, hint):
            raise InvalidArguments(f'{name} must be {getattr(hint, "__name__", hint)}, got {type(value).__name__}')


def _reset(given: Any, init_args: Mapping[str, Any] | None, kind: str) -> Any:
    if init_args:
        raise InvalidArguments(f'init_args need a {kind} given by name or class, got an object; omit init_args')
    if not callable(given):
        raise InvalidArguments(f'a {kind} must be a name, a class, an object or a function, got {type(given).__name__}')
    if isinstance(given, Preprocessor | DataFilter):
        given.begin_pass()
    return given


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in {Union, types.UnionType}:
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if hint in {int, float}:
        # JSON may encode a float such as 1.0 as the integer 1.
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    if origin in {list, Sequence}:
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return is_list and all(_fits(one, inner[0]) for one in cast('Sequence[Any]', value))
    kind = origin or hint
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)
