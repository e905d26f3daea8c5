"""Errors of loading plugins."""

from twinkle.errors import error_class


@error_class('plugin {plugin}: {problem}')
class PluginRefused(ValueError):
    """A plugin is not allowed here, or does not contain the requested class or function."""

    plugin: str
    problem: str
