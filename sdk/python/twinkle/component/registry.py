"""A registry of the components of one kind, and checks of the options they are built with."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast

from twinkle.errors import error_class
from twinkle.plugin import Plugin, allowed_plugins, is_plugin_id

_Component = TypeVar('_Component')

_VALUE_ERRORS = (TypeError, ArithmeticError, LookupError, AttributeError, AssertionError, RuntimeError)
"""Errors other than ValueError that a constructor may raise for an option's value."""


def near_misses(name: str, known: Iterable[str]) -> list[str]:
    """Return up to two known names that are similar to `name`, best match first, ignoring case."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=0.7)]


@error_class()
class UnknownComponent(ValueError):
    """No component of this kind and name exists."""

    kind: str
    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        similar = near_misses(self.name, self.known)
        hint = f'did you mean {" or ".join(similar)}? Known names:' if similar else 'known names:'
        return f'unknown {self.kind} {self.name!r}; {hint} {", ".join(self.known) or "none"}'


@error_class('{kind} {name}: {problem}')
class InvalidComponentOptions(ValueError):
    """A component does not accept the options it was given."""

    kind: str
    name: str
    problem: str


@error_class('{kind} {name} cannot be registered: {problem}')
class InvalidComponent(ValueError):
    """A class cannot be registered as a component."""

    kind: str
    name: str
    problem: str


class ComponentRegistry(Generic[_Component]):
    """Classes of one kind, by name.

    Args:
        kind: noun for the components in messages, such as 'loss'.
        base: class that every component derives from.
        classes: built-in components, registered under their class names.
        named: built-in components, registered under the given names.
        plugin_group: entry point group that `load_plugins` searches. Empty: no entry points.

    Concurrency: register all classes before other threads call `build`.
    """

    def __init__(
        self,
        kind: str,
        base: type[_Component],
        classes: tuple[type[_Component], ...],
        *,
        named: Mapping[str, type[_Component]] | None = None,
        plugin_group: str = '',
    ) -> None:
        self._kind, self._base, self._plugin_group = kind, base, plugin_group
        self._classes = {**{cls.__name__: cls for cls in classes}, **(named or {})}
        # Used by `name_of` only: `build` loads a plugin each time, so that the plugin policy is always checked.
        self._plugins: dict[str, type[_Component]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Registered names, sorted."""
        return tuple(sorted(self._classes))

    def name_of(self, component: 'type[_Component] | _Component') -> str:
        """Return the name under which a component's class can be built, or the class name if it is not registered."""
        cls = component if isinstance(component, type) else type(component)
        known = {**self._plugins, **self._classes}
        return next((name for name in sorted(known) if known[name] is cls), cls.__name__)

    def register(self, name: str = '') -> Callable[[type[_Component]], type[_Component]]:
        """Return a decorator that registers a class under `name`, by default its class name.

        Raises:
            InvalidComponent: raised by the decorator if the class does not implement the base, or the name is taken.
        """

        def decorate(cls: type[_Component]) -> type[_Component]:
            self._add(name or cls.__name__, cls)
            return cls

        return decorate

    def load_plugins(self, allowed_names: Iterable[str]) -> None:
        """Register third-party classes: entry points of installed packages, and plugins (`twinkle.plugin`).

        Only names passed here are imported. A service passes the names in its operator's configuration, never names
        that a client sent.

        Args:
            allowed_names: names of entry points and ids of plugins. An id may end in `@` and a digest that the code
                must match. Each class is registered under its name or id, without the digest.

        Raises:
            UnknownComponent: no installed package provides an entry point of this name.
            InvalidComponent: the class does not implement the base, its name is taken, or several installed packages
                provide it.
            PluginRefused: a plugin does not contain exactly one class of this kind, or has a different digest.
            HubError: a plugin cannot be downloaded.
        """
        offered = entry_points(group=self._plugin_group) if self._plugin_group else ()
        known = tuple(sorted({point.name for point in offered}))
        for name in sorted(set(allowed_names)):
            if self._load_plugin(name):
                continue
            points = [point for point in offered if point.name == name]
            if not points:
                raise UnknownComponent(f'{self._kind} plugin', name, known)
            if len(points) > 1:
                raise InvalidComponent(self._kind, name, 'several installed packages provide it')
            self._add(name, points[0].load())

    def _load_plugin(self, entry: str) -> bool:
        plugin = entry.partition('@')[0]
        with allowed_plugins(entry):
            if not is_plugin_id(plugin):
                return False
            self._add(plugin, Plugin.load_plugin(plugin, self._base))
            return True

    def _add(self, name: str, cls: Any) -> None:
        if not (isinstance(cls, type) and issubclass(cls, self._base)) or inspect.isabstract(cls):
            raise InvalidComponent(self._kind, name, f'it must be a class that implements {self._base.__name__}')
        if self._classes.setdefault(name, cls) is not cls:
            raise InvalidComponent(self._kind, name, 'the name is already registered')

    def build(self, component: 'str | type[_Component] | _Component', options: Mapping[str, Any]) -> _Component:
        """Build a component from its name, its class or a plugin id, or return a given instance.

        Raises:
            UnknownComponent: the name is not registered.
            InvalidComponentOptions: an option is unknown, missing or invalid, or options were given for an instance.
            PluginRefused: plugins are not allowed, or this plugin does not contain exactly one class of this kind.
            HubError: a plugin cannot be downloaded.
        """
        if isinstance(component, self._base):
            if options:
                problem = f'options cannot be applied to an instance, got {sorted(options)}'
                raise InvalidComponentOptions(self._kind, type(component).__name__, problem)
            return component
        if isinstance(component, str):
            component = self._class_of(component)
        return self._construct(cast('type[_Component]', component), options)

    def _class_of(self, name: str) -> type[_Component]:
        if name in self._classes:
            return self._classes[name]
        if is_plugin_id(name):
            cls = Plugin.load_plugin(name, self._base)
            self._plugins[name] = cls
            return cls
        raise UnknownComponent(self._kind, name, self.names)

    def _construct(self, cls: type[_Component], options: Mapping[str, Any]) -> _Component:
        check_options(self._kind, cls.__name__, cls, options)
        check_required(self._kind, cls.__name__, cls, options)
        try:
            return cls(**options)
        except ValueError as error:
            raise InvalidComponentOptions(self._kind, cls.__name__, str(error)) from error
        except _VALUE_ERRORS as error:
            # The original message describes the component's code rather than the caller's options.
            problem = f'an option has an invalid value: {dict(options)}'
            raise InvalidComponentOptions(self._kind, cls.__name__, problem) from error


def check_required(kind: str, name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Check that `options` contain every required parameter of `function`.

    Raises:
        InvalidComponentOptions: a required option is missing. The message lists all missing options.
    """
    parameters = inspect.signature(function).parameters.values()
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and parameter.name not in options
    ]
    if missing:
        raise InvalidComponentOptions(kind, name, f'missing required options {missing}')


def check_options(
    kind: str, name: str, function: Callable[..., Any], options: Mapping[str, Any], *, given: Sequence[str] = ()
) -> None:
    """Check that `function` accepts every option by name.

    Args:
        kind: kind of the component, for messages.
        name: name of the component, for messages.
        function: constructor of the component.
        options: options to check; only their names matter.
        given: parameters that the caller fills in itself, which are not options.

    Raises:
        InvalidComponentOptions: an option is unknown. The message lists the known options.
    """
    parameters = inspect.signature(function).parameters.values()
    known = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    takes_any = len(known) < len(parameters)
    known -= set(given)
    unknown = sorted(set(options).intersection(given) if takes_any else set(options) - known)
    if unknown:
        raise InvalidComponentOptions(kind, name, f'unknown options {unknown}; it takes {sorted(known)}')
