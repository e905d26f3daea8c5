"""A table of components of one kind, and how one of them is asked for."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast

from twinkle.errors import error_class
from twinkle.plugin import Plugin, allowed_plugins, is_plugin_id

_Component = TypeVar('_Component')

_MISFITS = (TypeError, ArithmeticError, LookupError, AttributeError, AssertionError, RuntimeError)
"""What constructors raise for values that they did not expect at all."""


def near_misses(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that somebody who typed `name` may have meant, the nearest first, at most two.

    Letters count whatever their case.
    """
    by_letters = {one.lower(): one for one in known}
    return [by_letters[letters] for letters in difflib.get_close_matches(name.lower(), by_letters, n=2, cutoff=0.7)]


@error_class()
class UnknownComponent(ValueError):
    """No component of that kind and name exists."""

    kind: str
    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        matches = near_misses(self.name, self.known)
        guess = f'did you mean {" or ".join(matches)}? There are' if matches else 'there are'
        return f'there is no {self.kind} {self.name!r}; {guess} {", ".join(self.known) or "none"}'


@error_class('{kind} {name}: {problem}')
class InvalidComponentOptions(ValueError):
    """A component does not accept the given options."""

    kind: str
    name: str
    problem: str


@error_class('{kind} {name} cannot be registered: {problem}')
class InvalidComponent(ValueError):
    """An object cannot be registered as a component."""

    kind: str
    name: str
    problem: str


class ComponentRegistry(Generic[_Component]):
    """Classes of one kind by name.

    Args:
        kind: what they are, for messages.
        base: what every instance is.
        classes: the ones known from the start, by the class's name.
        named: more of them, by names of their own.
        plugin_group: entry points `load_plugins` looks among; empty where there are no plugins.

    Concurrency: register before others build.
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
        # Only to name them: each time one is asked for, it is looked up whether it is allowed.
        self._plugins: dict[str, type[_Component]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names `build` takes, sorted."""
        return tuple(sorted(self._classes))

    def name_of(self, component: 'type[_Component] | _Component') -> str:
        """Return the name under which `build` makes a component's class; its own name where there is none."""
        cls = component if isinstance(component, type) else type(component)
        known = {**self._plugins, **self._classes}
        return next((name for name in sorted(known) if known[name] is cls), cls.__name__)

    def register(self, name: str = '') -> Callable[[type[_Component]], type[_Component]]:
        """Return a decorator that makes a class of this process known, under `name` or the class's own.

        Raises:
            InvalidComponent: from the decorator: it is no such class, or the name is taken.
        """

        def decorate(cls: type[_Component]) -> type[_Component]:
            self._add(name or cls.__name__, cls)
            return cls

        return decorate

    def load_plugins(self, allowed_names: Iterable[str]) -> None:
        """Make classes of others known: of installed packages, and of plugins (`twinkle.plugin`).

        Nothing of one is imported before it is allowed here: a service passes what its operator listed, never what
        a client sent.

        Args:
            allowed_names: names of entry points, and ids of plugins, with `@` and a digest where the code is fixed;
                each is the name of its class here, without the digest.

        Raises:
            UnknownComponent: no package offers a plugin of that name.
            InvalidComponent: it is no such class, or its name is taken.
            PluginRefused: a plugin does not hold exactly one such class.
            HubError: a plugin cannot be had.
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
                raise InvalidComponent(self._kind, name, 'several packages offer it')
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
            raise InvalidComponent(self._kind, name, 'the name is taken')

    def build(self, component: 'str | type[_Component] | _Component', options: Mapping[str, Any]) -> _Component:
        """Return a component given by name, class, instance or, where plugins are allowed, as a plugin's id.

        Raises:
            UnknownComponent: the name is not registered.
            InvalidComponentOptions: an option is unknown or refused, or options come beside an instance.
            PluginRefused: plugins are not allowed, or this one does not hold exactly one such class.
        """
        if isinstance(component, self._base):
            if options:
                raise InvalidComponentOptions(self._kind, type(component).__name__, 'is built; it takes no options')
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
        except _MISFITS as error:
            # Python's own words would tell of our code, and nothing of the options.
            problem = f'its options have values of no use: {dict(options)}'
            raise InvalidComponentOptions(self._kind, cls.__name__, problem) from error


def check_required(kind: str, name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Check that options are there which `function` cannot do without.

    Raises:
        InvalidComponentOptions: names what is missing.
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
        raise InvalidComponentOptions(kind, name, f'needs the options {missing}')


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
