"""Components that come from a hub or a folder as code: off by default, since running them runs their author's code.

A plugin is a repository or folder with an `__init__.py`. It is allowed by name, loaded under a module name of its
own, and has to hold exactly one class of the kind that is asked for.
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
