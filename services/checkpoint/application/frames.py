"""What a record is called in a header."""

from services.checkpoint.domain import Checkpoint, Record
from services.kit.weights import CheckpointTarget, Commit, Frame, Header, VersionTarget
from twinkle.checkpoint_engine import WeightManifest

__all__ = ['CheckpointTarget', 'Commit', 'Frame', 'Header', 'VersionTarget', 'header_of']


def header_of(record: Record, manifest: WeightManifest) -> Header:
    """Return the header of a state that is sent; `manifest` describes what is sent of it."""
    return Header(record.key.adapter.adapter_id, manifest, _target_of(record))


def _target_of(record: Record) -> VersionTarget | CheckpointTarget:
    if isinstance(record, Checkpoint):
        return CheckpointTarget(record.key.name, step_count=record.step_count)
    return VersionTarget(record.version, record.is_pinned)
