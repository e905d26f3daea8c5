"""Errors that only the checkpoint service raises. The shared ones are in `services.kit.errors`."""

from dataclasses import dataclass

from services.kit.errors import Aborted, AlreadyExists


@dataclass(eq=False)
class VersionConflict(Aborted):
    """The version is not newer than all others, and not one of them again."""

    reason = 'VERSION_CONFLICT'
    adapter_id: str
    version: int

    def __str__(self) -> str:
        return f'adapter {self.adapter_id!r} has version {self.version} already, or a newer one'


@dataclass(eq=False)
class CheckpointExists(AlreadyExists):
    """A checkpoint of that name exists and may not be replaced."""

    reason = 'CHECKPOINT_EXISTS'
    checkpoint_id: str

    def __str__(self) -> str:
        return f'checkpoint {self.checkpoint_id!r} exists; allow overwriting or choose another name'


@dataclass(eq=False)
class CheckpointIdTaken(AlreadyExists):
    """Another tenant's checkpoint of that path is public; whose, is not told."""

    reason = 'ID_TAKEN'
    id: str
    kind: str = 'checkpoint'

    def __str__(self) -> str:
        return f'another checkpoint {self.id!r} is public; save this one under another name'
