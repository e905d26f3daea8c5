"""The policy for loading plugins: none, a list, or all.

The policy is stored in environment variables, so child processes inherit it.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager

from twinkle.plugin.errors import PluginRefused

TRUST_VARIABLE = 'TWINKLE_TRUST_REMOTE_CODE'
LIST_VARIABLE = 'TWINKLE_PLUGINS'

_NONE = 'none'
"""Value of `TWINKLE_PLUGINS` that disables plugin ids: they are treated as ordinary, unknown names."""
_DIGEST_MARK = '@'
_MIN_DIGITS = 12


def trust_remote_code() -> bool:
    """Return whether every plugin is allowed: `TWINKLE_TRUST_REMOTE_CODE` is '1'. Unset, empty and '0' mean no.

    Raises:
        PluginRefused: the variable has any other value.
    """
    value = os.environ.get(TRUST_VARIABLE, '0').strip()
    if value not in ('0', '1', ''):
        raise PluginRefused('', f"{TRUST_VARIABLE} must be '0' or '1', got {value!r}")
    return value == '1'


def allow_plugins(*plugins: str) -> None:
    """Add plugins to `TWINKLE_PLUGINS`, which allows them in this process and its future child processes.

    Args:
        plugins: plugin ids. An id may end in `@` and at least the first 12 digits of the digest that the code must
            have: `ms://me/my-loss@3f5ab90c21d4`.

    Raises:
        PluginRefused: an id contains a comma, which separates ids in the variable.
    """
    for plugin in plugins:
        if ',' in plugin:
            raise PluginRefused(plugin, 'contains a comma; pass each plugin as a separate argument')
    os.environ[LIST_VARIABLE] = ','.join([*(entry for entry in _listed() if entry != _NONE), *plugins])


@contextmanager
def allowed_plugins(*plugins: str) -> Generator[None]:
    """Return a context manager that allows plugins, like `allow_plugins`, and restores the list on exit."""
    before = os.environ.get(LIST_VARIABLE)
    allow_plugins(*plugins)
    try:
        yield
    finally:
        if before is None:
            del os.environ[LIST_VARIABLE]
        else:
            os.environ[LIST_VARIABLE] = before


def keep_plugins_out() -> None:
    """Disable plugins in this process and its future child processes, and treat plugin ids as unknown names.

    Services call it because their clients choose components by name. Plugins listed in a service's configuration are
    loaded explicitly with `ComponentRegistry.load_plugins`.
    """
    os.environ[TRUST_VARIABLE], os.environ[LIST_VARIABLE] = '0', _NONE


def are_plugins_kept_out() -> bool:
    """Return whether `keep_plugins_out` is in effect, from this process or inherited from its parent."""
    return _listed() == [_NONE]


def check_allowed(plugin: str) -> None:
    """Refuse a plugin that is not allowed; call it before downloading anything.

    Raises:
        PluginRefused: the plugin is not allowed. The message explains how to allow it.
    """
    if not trust_remote_code() and not _entries(plugin):
        raise PluginRefused(
            plugin,
            f'plugins run third-party code and are disabled; if you trust this one, call allow_plugins({plugin!r}) '
            f'or set {LIST_VARIABLE}={plugin} ({TRUST_VARIABLE}=1 allows all plugins)',
        )


def check_digest(plugin: str, digest: str) -> None:
    """Refuse code whose digest is not allowed; call it before running the code.

    Raises:
        PluginRefused: no listed entry of the plugin allows this digest.
    """
    entries = _entries(plugin)
    wanted = [entry.rpartition(_DIGEST_MARK)[2] for entry in entries if entry != plugin]
    # A required digest is enforced even if all plugins are allowed.
    if plugin in entries or (not wanted and trust_remote_code()):
        return
    if not any(len(start) >= _MIN_DIGITS and digest.startswith(start) for start in wanted):
        raise PluginRefused(
            plugin,
            f'its code has the digest {digest}, but {LIST_VARIABLE} requires one of {wanted}; an entry needs at least '
            f'{_MIN_DIGITS} digits',
        )


def _entries(plugin: str) -> list[str]:
    return [entry for entry in _listed() if entry == plugin or entry.rpartition(_DIGEST_MARK)[0] == plugin]


def _listed() -> list[str]:
    return [entry.strip() for entry in os.environ.get(LIST_VARIABLE, '').split(',') if entry.strip()]
