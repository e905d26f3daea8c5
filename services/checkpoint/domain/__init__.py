"""Versions and checkpoints, and their rules. This package performs no I/O, and reads neither a clock nor weights."""

from twinkle_services.checkpoint.domain.catalogue import Catalogue
from twinkle_services.checkpoint.domain.change_log import Change, ChangeLog
from twinkle_services.checkpoint.domain.errors import CheckpointExists, VersionConflict
from twinkle_services.checkpoint.domain.keys import AdapterKey, CheckpointKey, VersionKey, parse_checkpoint_path
from twinkle_services.checkpoint.domain.records import AdapterVersion, Checkpoint, DamagedState, NewestMark, Record
from twinkle_services.checkpoint.domain.version_ring import VersionRing

__all__ = [
    'AdapterKey',
    'AdapterVersion',
    'Catalogue',
    'Change',
    'ChangeLog',
    'Checkpoint',
    'CheckpointExists',
    'CheckpointKey',
    'DamagedState',
    'NewestMark',
    'Record',
    'VersionConflict',
    'VersionKey',
    'VersionRing',
    'parse_checkpoint_path',
]
