"""Preprocessors and filters by name."""

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from twinkle.preprocessor.alpaca import AlpacaProcessor
from twinkle.preprocessor.base import Columns, DataFilter, Preprocessor, Row
from twinkle.preprocessor.competition_math import CompetitionMathProcessor
from twinkle.preprocessor.countdown import CountdownProcessor
from twinkle.preprocessor.errors import InvalidArguments, UnknownPreprocessor
from twinkle.preprocessor.gsm8k import GSM8KProcessor
from twinkle.preprocessor.length_filter import TextLengthFilter
from twinkle.preprocessor.self_cognition import SelfCognitionProcessor

MapFunction = Preprocessor | Callable[[Columns], Columns]
FilterFunction = DataFilter | Callable[[Row], bool]

_PREPROCESSORS: dict[str, type[Preprocessor]] = {
    kind.__name__: kind
    for kind in (
        AlpacaProcessor,
        CompetitionMathProcessor,
        CountdownProcessor,
        GSM8KProcessor,
        SelfCognitionProcessor,
    )
}
_FILTERS: dict[str, type[DataFilter]] = {kind.__name__: kind for kind in (TextLengthFilter,)}


def preprocessor_names() -> tuple[str, ...]:
    """Return the names `build_preprocessor` takes, sorted."""
    return tuple(sorted(_PREPROCESSORS))


def filter_names() -> tuple[str, ...]:
    """Return the names `build_filter` takes, sorted."""
    return tuple(sorted(_FILTERS))


def build_preprocessor(
    preprocessor: 'str | type[Preprocessor] | MapFunction', init_args: Mapping[str, Any] | None = None
) -> MapFunction:
    """Return a preprocessor given by name, class, instance or as a function of columns.

    Args:
        init_args: of its constructor; for names and classes only.

    Raises:
        UnknownPreprocessor: the name is not registered.
        InvalidArguments: arguments the constructor does not take.
    """
    return _build(preprocessor, init_args, _PREPROCESSORS, 'preprocessor')


def build_filter(
    row_filter: 'str | type[DataFilter] | FilterFunction', init_args: Mapping[str, Any] | None = None
) -> FilterFunction:
    """Return a filter given by name, class, instance or as a function of a row.

    Raises:
        UnknownPreprocessor: the name is not registered.
        InvalidArguments: arguments the constructor does not take.
    """
    return _build(row_filter, init_args, _FILTERS, 'filter')


def _build(given: Any, init_args: Mapping[str, Any] | None, known: Mapping[str, type[Any]], kind: str) -> Any:
    if isinstance(given, str):
        if given not in known:
            raise UnknownPreprocessor(f'there is no {kind} {given!r}; there are {", ".join(sorted(known))}')
        given = known[given]
        _check_types(given, init_args or {})
    if not isinstance(given, type):
        if init_args:
            raise InvalidArguments(f'init_args are for a {kind} given by name or class, not for one already built')
        return given
    try:
        inspect.signature(given).bind(**(init_args or {}))
    except TypeError as error:
        raise InvalidArguments(f'{given.__name__}{inspect.signature(given)}: {error}') from error
    return given(**(init_args or {}))


def _check_types(kind: type[Any], init_args: Mapping[str, Any]) -> None:
    """Check arguments that came over the wire, where no type checker has seen them."""
    hints = typing.get_type_hints(kind.__init__)
    for name, value in init_args.items():
        hint = hints.get(name)
        if hint is not None and not isinstance(value, hint):
            raise InvalidArguments(f'{name} must be {getattr(hint, "__name__", hint)}, got {type(value).__name__}')
