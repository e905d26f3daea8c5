"""Errors of loading plugins."""

from twinkle.errors import error_class


@error_class('plugin {plugin}: {problem}')
class PluginRefused(ValueError):
    """A plugin or its code is not allowed here, or it does not contain the requested class or function."""

    plugin: str
    problem: str
