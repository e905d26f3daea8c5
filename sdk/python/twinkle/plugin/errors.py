"""Errors of loading plugins."""

from twinkle.errors import error_class


@error_class('plugin {plugin}: {problem}')
class PluginRefused(ValueError):
    """A plugin is not allowed here, or is not of the requested kind; none of its names are used."""

    plugin: str
    problem: str
