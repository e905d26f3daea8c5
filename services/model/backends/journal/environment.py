"""Records the settings and library versions that may change the floating-point results of a replay.

A journal remains usable if the environment changes. The change is logged, because replayed results may differ from the
recorded ones.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import structlog

_log = structlog.get_logger('journal')
_FILE = 'circumstances.json'
"""Name of the file with the environment in which the journal was last used."""

ReplayEnvironment = Mapping[str, str | int]


def changed_environment(folder: Path, current: ReplayEnvironment) -> dict[str, str]:
    """Return the settings that changed since the last call, each as `old -> new`, and store the current settings."""
    before = stored_environment(folder)
    (folder / _FILE).write_text(json.dumps(current, indent=2, sort_keys=True))
    return {name: f'{before[name]} -> {current[name]}' for name in _differing(before, current)}


def differing_settings(folder: Path, other: Path) -> list[str]:
    """Return the sorted names of the settings that both journals recorded with different values at their last use."""
    return sorted(_differing(stored_environment(folder), stored_environment(other)))


def stored_environment(folder: Path) -> ReplayEnvironment:
    """Return the environment in which a journal was last used; empty if it is unknown."""
    try:
        return json.loads((folder / _FILE).read_text())
    except (OSError, ValueError):
        return {}


def _differing(before: ReplayEnvironment, current: ReplayEnvironment) -> list[str]:
    return [name for name in current if name in before and before[name] != current[name]]


def log_environment_changes(folder: Path, current: ReplayEnvironment) -> None:
    """Log the settings that changed since the journal was last used."""
    changed = changed_environment(folder, current)
    if changed:
        _log.warning('environment changed; replayed results may differ in the last bits', **changed)
