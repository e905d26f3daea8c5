"""Loads classes and functions from plugins.

A plugin's code is imported as a package named after its digest. Different plugins therefore never share a module name,
changed code becomes a new module, and the same code is imported once.
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
    """Return whether a component's name is a plugin id: a hub id such as `hf://org/name`, or a path.

    Always false while `keep_plugins_out` is in effect.
    """
    return text.startswith(_PREFIXES) and not are_plugins_kept_out()


class Plugin:
    """Loads component classes from plugins."""

    @staticmethod
    def load_plugin(plugin: str, base: type[_Base]) -> type[_Base]:
        """Return the only concrete subclass of `base` in a plugin. This runs the plugin's code.

        Args:
            plugin: `hf://org/name`, `ms://org/name`, or a local folder.
            base: base class of the component, such as `twinkle.loss.Loss`.

        Raises:
            PluginRefused: the plugin is not allowed here; its code does not have the required digest, or contains
                compiled files or links to folders; or the plugin does not define exactly one such class.
            HubError: the plugin cannot be downloaded.

        Concurrency: safe from any thread. The same code runs once, and all callers receive the same class.
        """
        module = _load(plugin)
        found = [cls for cls in _defined_classes(module) if issubclass(cls, base) and not inspect.isabstract(cls)]
        if len(found) != 1:
            names = sorted(cls.__name__ for cls in found)
            raise PluginRefused(
                plugin, f'must define exactly one class that implements {base.__name__}, found {names or "none"}'
            )
        return found[0]


def load_function(plugin: str, name: str) -> Callable[..., Any]:
    """Return a plugin's function by name. This runs the plugin's code.

    Raises:
        PluginRefused: see `Plugin.load_plugin`; or the plugin has no function of this name.
        HubError: the plugin cannot be downloaded.
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
        logging.getLogger('twinkle').info('loading plugin id=%s digest=%s', plugin, digest)
        return _run(name, code)


def _run(name: str, code: PluginCode) -> ModuleType:
    spec = _finder.add(name, code)
    module = module_from_spec(spec)
    # The module is registered before it runs, so that its relative imports resolve.
    sys.modules[name] = module
    is_loaded = False
    try:
        cast('Loader', spec.loader).exec_module(module)
        is_loaded = True
    finally:
        if not is_loaded:
            for loaded in [key for key in sys.modules if key == name or key.startswith(f'{name}.')]:
                del sys.modules[loaded]
    return module


def _defined_classes(module: ModuleType) -> list[type]:
    """Return the classes in a plugin's `__init__.py` that the plugin itself defines."""
    return [
        value
        for value in {id(value): value for value in vars(module).values()}.values()
        if isinstance(value, type) and (value.__module__ + '.').startswith(f'{module.__name__}.')
    ]
