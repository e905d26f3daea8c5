"""Tests of the constructors, messages and pickling that `error_class` generates."""

import importlib
import pickle
from dataclasses import KW_ONLY, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import twinkle
from twinkle.errors import error_class

_EXAMPLES: dict[Any, object] = {
    int: 3,
    int | None: 3,
    float: 0.5,
    str: 'word',
    tuple[str, ...]: ('a', 'b'),
    list[str]: ['a', 'b'],
    BaseException: ValueError('word'),
}
"""A value for a field of each type."""


@error_class('no {kind} {name!r}; known: {known}')
class _Missing(KeyError):
    kind: str
    name: str
    _: KW_ONLY
    known: tuple[str, ...] = ()


def _library_errors() -> list[type[Any]]:
    names = sorted(path.parent.name for path in Path(twinkle.__path__[0]).glob('*/errors.py'))
    modules = [importlib.import_module(f'twinkle.{name}.errors') for name in names]
    found = {item for module in modules for item in vars(module).values() if isinstance(item, type)}
    return sorted((item for item in found if is_dataclass(item)), key=str)


def test_message_is_formatted_from_the_fields() -> None:
    """A message shows the fields, and tuples as lists of words."""
    assert str(_Missing('loss', 'ppo', known=('grpo', 'gkd'))) == "no loss 'ppo'; known: grpo, gkd"
    assert str(_Missing('loss', 'ppo')) == "no loss 'ppo'; known: none"


def test_keyword_fields_survive_pickling() -> None:
    """A pickled error keeps its fields, including keyword-only fields."""
    copy = pickle.loads(pickle.dumps(_Missing('loss', 'ppo', known=('grpo',))))
    assert (copy.kind, copy.name, copy.known) == ('loss', 'ppo', ('grpo',))


def test_errors_with_equal_fields_are_different() -> None:
    """Two errors are equal only if they are the same object, like Python's own exceptions."""
    assert _Missing('a', 'b') != _Missing('a', 'b')
    assert len({_Missing('a', 'b'), _Missing('a', 'b')}) == 2


def test_message_with_an_unknown_field_is_refused() -> None:
    """A message that refers to an unknown field raises an error when the class is defined."""
    with pytest.raises(TypeError):

        @error_class('no {thing}')
        class Invalid(ValueError):
            name: str


def test_class_without_a_message_is_refused() -> None:
    """A class needs a message or a `__str__` method."""
    with pytest.raises(TypeError):

        @error_class()
        class Invalid(ValueError):
            name: str


@pytest.mark.parametrize('error', _library_errors(), ids=lambda error: f'{error.__module__}.{error.__name__}')
def test_library_error_survives_pickling(error: type[Any]) -> None:
    """Every error of the library keeps its class, message and field names when it is pickled."""
    hints = get_type_hints(error)
    instance = error(**{item.name: _EXAMPLES[hints[item.name]] for item in fields(error) if item.init})
    copy = pickle.loads(pickle.dumps(instance))
    assert type(copy) is error
    assert str(copy) == str(instance) != ''
    assert vars(copy).keys() == vars(instance).keys()
