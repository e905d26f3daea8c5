"""A table of components of one kind, and how one of them is asked for."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

_Component = TypeVar('_Component')


class UnknownComponent(ValueError):
    """No component of that kind and name exists."""

    def __init__(self, kind: str, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f'there is no {kind} {name!r}; there are {", ".join(known)}')
        self.kind, self.name, self.known = kind, name, known


class InvalidComponentOptions(ValueError):
    """A component does not take the options it was given."""

    def __init__(self, kind: str, name: str, problem: str) -> None:
        super().__init__(f'{kind} {name}: {problem}')
        self.kind, self.name, self.problem = kind, name, problem


class ComponentRegistry(Generic[_Component]):
    """Classes of one kind by name.

    Args:
        kind: what they are, for messages.
        base: what every instance is.
        classes: the ones known from the start.
    """

    def __init__(self, kind: str, base: type[_Component], classes: tuple[type[_Component], ...]) -> None:
        self._kind, self._base = kind, base
        self._classes = {cls.__name__: cls for cls in classes}

    @property
    def names(self) -> tuple[str, ...]:
        """The names `build` takes, sorted."""
        return tuple(sorted(self._classes))

    def build(self, component: 'str | type[_Component] | _Component', options: Mapping[str, Any]) -> _Component:
        """Return a component given by name, class or instance.

        Raises:
            UnknownComponent: the name is not registered.
            InvalidComponentOptions: an option is unknown or refused, or options come beside an instance.
        """
        if isinstance(component, self._base):
            if options:
                raise InvalidComponentOptions(self._kind, type(component).__name__, 'is built; it takes no options')
            return component
        if isinstance(component, str):
            if component not in self._classes:
                raise UnknownComponent(self._kind, component, self.names)
            component = self._classes[component]
        return self._construct(cast('type[_Component]', component), options)

    def _construct(self, cls: type[_Component], options: Mapping[str, Any]) -> _Component:
        check_options(self._kind, cls.__name__, cls, options)
        try:
            return cls(**options)
        except (TypeError, ValueError) as error:
            raise InvalidComponentOptions(self._kind, cls.__name__, str(error)) from error


def check_options(
    kind: str, name: str, function: Callable[..., Any], options: Mapping[str, Any], *, given: Sequence[str] = ()
) -> None:
    """Check that `function` takes every option by name.

    Args:
        kind: of the component, for messages.
        name: of the component.
        function: its constructor.
        options: what it is asked for with.
        given: parameters that are not for options, as the caller fills them in.

    Raises:
        InvalidComponentOptions: names the unknown ones and what there is.
    """
    parameters = inspect.signature(function).parameters.values()
    known = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    takes_any = len(known) < len(parameters)
    known -= set(given)
    unknown = sorted(set(options).intersection(given) if takes_any else set(options) - known)
    if unknown:
        raise InvalidComponentOptions(kind, name, f'unknown options {unknown}; it takes {sorted(known)}')
