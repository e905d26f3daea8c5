"""What the last bits of a replay depend on beside the model, and a word in the log where it has changed.

Other passes, devices or libraries train as well, only to other last bits: no reason to refuse a journal, but one to
say why a replay may differ from what is on record.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import structlog

_log = structlog.get_logger('journal')
_FILE = 'circumstances.json'

ReplayEnvironment = Mapping[str, str | int]


def changed_environment(folder: Path, present: ReplayEnvironment) -> dict[str, str]:
    """Return what differs from when the journal in `folder` was last used, as `was -> is`, and keep what is."""
    path = folder / _FILE
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        before = {}
    path.write_text(json.dumps(present, indent=2, sort_keys=True))
    known = [name for name in present if name in before]
    return {name: f'{before[name]} -> {present[name]}' for name in known if before[name] != present[name]}


def log_environment_changes(folder: Path, present: ReplayEnvironment) -> None:
    """Log what differs, if anything does."""
    changed = changed_environment(folder, present)
    if changed:
        _log.warning('operations that are replayed may have other last bits than on record', **changed)
