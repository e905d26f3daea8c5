"""Support for commands whose options are the fields of a dataclass."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

_Options = TypeVar('_Options')


def with_options(run: Callable[[_Options], None]) -> Callable[..., None]:
    """Return a typer command for a function that takes its options as one dataclass.

    Args:
        run: Function with the dataclass as its only parameter. Its docstring is the help of the command. The fields
            are annotated like typer's parameters; a field without a default is required.
    """
    ((_, kind),) = ((name, hint) for name, hint in get_type_hints(run).items() if name != 'return')
    hints = get_type_hints(kind, include_extras=True)

    def command(**given: Any) -> None:
        run(kind(**given))

    parameters = [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if item.default is MISSING else item.default,
            annotation=hints[item.name],
        )
        for item in fields(kind)
    ]
    command.__doc__ = inspect.getdoc(run)
    command.__name__ = run.__name__
    setattr(command, '__signature__', inspect.Signature(parameters))  # noqa: B010 - functions are not typed with one
    return command
