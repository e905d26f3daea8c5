"""Plugins: components and functions whose code is loaded from a hub or a folder.

Plugins are disabled by default, because loading a plugin runs its code. A plugin is a repository or folder with an
`__init__.py`. It must be allowed by name, is loaded under a unique module name, and must contain exactly one class of
the requested kind, or the requested function.
"""

from twinkle.plugin.errors import PluginRefused
from twinkle.plugin.loading import Plugin, is_plugin_id, load_function
from twinkle.plugin.policy import allow_plugins, allowed_plugins, keep_plugins_out, trust_remote_code

__all__ = [
    'Plugin',
    'PluginRefused',
    'allow_plugins',
    'allowed_plugins',
    'is_plugin_id',
    'keep_plugins_out',
    'load_function',
    'trust_remote_code',
]
