"""From a plugin's id to the class it holds.

The code of a plugin is loaded as a package named after its digest: two plugins never share a name, one that changed
is another module, and the same code is loaded once.
"""

import inspect
import logging
import sys
import threading
from collections.abc import Callable
from importlib.abc import Loader
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, TypeVar, cast

from twinkle.hub import resolve_plugin
from twinkle.plugin.code import PluginCode, PluginFinder
from twinkle.plugin.errors import PluginRefused
from twinkle.plugin.policy import are_plugins_kept_out, check_allowed, check_digest

_Base = TypeVar('_Base')

_PREFIXES = ('hf://', 'ms://', '/', './', '../', '~/')
_PACKAGE = 'twinkle_plugin_'
_finder = PluginFinder()
_lock = threading.RLock()


def is_plugin_id(text: str) -> bool:
    """Return whether a component's name is the id of a plugin: one of a hub, or a path that is written as one.

    In a process that keeps plugins out none is.
    """
    return text.startswith(_PREFIXES) and not are_plugins_kept_out()


class Plugin:
    """Loads components that are not part of this library."""

    @staticmethod
    def load_plugin(plugin: str, base: type[_Base]) -> type[_Base]:
        """Return the one class of a plugin that is a `base`; runs the plugin's code.

        Args:
            plugin: `hf://org/name`, `ms://org/name`, or a folder of this machine.
            base: what the class has to be a subclass of, such as `twinkle.loss.Loss`.

        Raises:
            PluginRefused: plugins are not allowed here, the code is not what was allowed, or it does not hold
                exactly one such class.
            HubError: the plugin cannot be had.

        Concurrency: any thread; of two that ask for the same code one runs it and both get the same class.
        """
        module = _load(plugin)
        found = [cls for cls in _own_classes(module) if issubclass(cls, base) and not inspect.isabstract(cls)]
        if len(found) != 1:
            names = sorted(cls.__name__ for cls in found)
            raise PluginRefused(
                plugin, f'must define exactly one class that implements {base.__name__}, and defines {names or "none"}'
            )
        return found[0]


def load_function(plugin: str, name: str) -> Callable[..., Any]:
    """Return a function of a plugin by its name; runs the plugin's code.

    Raises:
        PluginRefused: as `Plugin.load_plugin`, or it has no function of that name.
        HubError: the plugin cannot be had.
    """
    function = getattr(_load(plugin), name, None)
    if not callable(function):
        raise PluginRefused(plugin, f'has no function {name!r}')
    return function


def _load(plugin: str) -> ModuleType:
    check_allowed(plugin)
    code = PluginCode.read(resolve_plugin(plugin))
    digest = code.digest
    check_digest(plugin, digest)
    name = f'{_PACKAGE}{digest[:32]}'
    with _lock:
        if name in sys.modules:
            return sys.modules[name]
        logging.getLogger('twinkle').info('plugin %s: its code runs here, its digest is %s', plugin, digest)
        return _run(name, code)


def _run(name: str, code: PluginCode) -> ModuleType:
    spec = _finder.add(name, code)
    module = module_from_spec(spec)
    # Before it runs, so that its own modules can be imported relative to it.
    sys.modules[name] = module
    is_whole = False
    try:
        cast('Loader', spec.loader).exec_module(module)
        is_whole = True
    finally:
        if not is_whole:
            for loaded in [key for key in sys.modules if key == name or key.startswith(f'{name}.')]:
                del sys.modules[loaded]
    return module


def _own_classes(module: ModuleType) -> list[type]:
    """Return the classes that the plugin's code defines and its `__init__.py` has, not those that it imports."""
    return [
        value
        for value in {id(value): value for value in vars(module).values()}.values()
        if isinstance(value, type) and (value.__module__ + '.').startswith(f'{module.__name__}.')
    ]
