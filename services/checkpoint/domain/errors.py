"""Errors that only the checkpoint service raises. Shared errors are in `twinkle_services.kit.errors`."""

from twinkle_services.kit.errors import Aborted, AlreadyExists, domain_error


@domain_error(
    'VERSION_CONFLICT', 'adapter {adapter_id!r} already had version {version} or a newer one; publish a higher number'
)
class VersionConflict(Aborted):
    """The version number, or a higher one, was used before."""

    adapter_id: str
    version: int


@domain_error('CHECKPOINT_EXISTS', 'checkpoint {checkpoint_id!r} exists; allow overwriting or choose another name')
class CheckpointExists(AlreadyExists):
    """A checkpoint with that name exists and may not be replaced."""

    checkpoint_id: str


@domain_error('ID_TAKEN', 'another checkpoint {id!r} is public; save this one under another name')
class CheckpointIdTaken(AlreadyExists):
    """Another tenant's checkpoint with that path is public; the error does not reveal the tenant."""

    id: str
    kind: str = 'checkpoint'
