"""Which plugins this process may load: none, those that are listed, or all.

It is kept in the environment, so processes that this one starts are bound by it too.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager

from twinkle.plugin.errors import PluginRefused

TRUST_VARIABLE = 'TWINKLE_TRUST_REMOTE_CODE'
LIST_VARIABLE = 'TWINKLE_PLUGINS'

_NONE = 'none'
"""Of `TWINKLE_PLUGINS`: ids of plugins are not even known as such."""
_DIGEST_MARK = '@'
_LEAST_DIGITS = 12


def trust_remote_code() -> bool:
    """Return whether every plugin is allowed: `TWINKLE_TRUST_REMOTE_CODE` is '1'. Unset and '0' mean no.

    Raises:
        PluginRefused: the variable is something else.
    """
    said = os.environ.get(TRUST_VARIABLE, '0').strip()
    if said not in ('0', '1', ''):
        raise PluginRefused('', f"{TRUST_VARIABLE} must be '0' or '1', got {said!r}")
    return said == '1'


def allow_plugins(*plugins: str) -> None:
    """Allow plugins in this process and those it will start, as `TWINKLE_PLUGINS` would.

    Args:
        plugins: ids as they are asked for, each alone or with `@` and the beginning of the digest that its code must
            have, at least 12 digits: `ms://me/my-loss@3f5ab90c21d4`.

    Raises:
        PluginRefused: one holds a comma, which would be read as the end of its name.
    """
    for plugin in plugins:
        if ',' in plugin:
            raise PluginRefused(plugin, 'holds a comma, which parts plugins in a list; give each alone')
    os.environ[LIST_VARIABLE] = ','.join([*(entry for entry in _listed() if entry != _NONE), *plugins])


@contextmanager
def allowed_plugins(*plugins: str) -> Generator[None]:
    """Allow plugins as `allow_plugins` until the block ends."""
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
    """Allow none, whatever the environment said, and know no ids of plugins: they are names that nothing has.

    Services call it, since strangers choose their components. What an operator lists in a service's configuration is
    loaded all the same (`ComponentRegistry.load_plugins`).
    """
    os.environ[TRUST_VARIABLE], os.environ[LIST_VARIABLE] = '0', _NONE


def are_plugins_kept_out() -> bool:
    """Return whether `keep_plugins_out` was called, here or in the process that started this one."""
    return _listed() == [_NONE]


def check_allowed(plugin: str) -> None:
    """Refuse a plugin that is not allowed, before anything of it is fetched.

    Raises:
        PluginRefused: the sentence says how it would be.
    """
    if not trust_remote_code() and not _entries(plugin):
        raise PluginRefused(
            plugin,
            f'plugins run code of others and are off; if you trust this one, call allow_plugins({plugin!r}) or set '
            f'{LIST_VARIABLE}={plugin} ({TRUST_VARIABLE}=1 allows all)',
        )


def check_digest(plugin: str, digest: str) -> None:
    """Refuse code that is not the code that was allowed, before any of it is run.

    Raises:
        PluginRefused: every listed entry of the plugin names another digest.
    """
    entries = _entries(plugin)
    wanted = [entry.rpartition(_DIGEST_MARK)[2] for entry in entries if entry != plugin]
    # A digest that somebody gave holds even where all plugins are allowed.
    if plugin in entries or (not wanted and trust_remote_code()):
        return
    if not any(len(start) >= _LEAST_DIGITS and digest.startswith(start) for start in wanted):
        raise PluginRefused(
            plugin,
            f'its code has the digest {digest}, and {LIST_VARIABLE} allows {wanted} only, each of at least '
            f'{_LEAST_DIGITS} digits',
        )


def _entries(plugin: str) -> list[str]:
    return [entry for entry in _listed() if entry == plugin or entry.rpartition(_DIGEST_MARK)[0] == plugin]


def _listed() -> list[str]:
    return [entry.strip() for entry in os.environ.get(LIST_VARIABLE, '').split(',') if entry.strip()]
