"""Keys of versions and checkpoints. The tenant is part of every key.

Since every lookup needs a tenant, a state of another tenant cannot be found by mistake.
"""

from dataclasses import dataclass

from twinkle_services.kit.names import is_adapter_id, is_name

PATH_SCHEME = 'twinkle://'


@dataclass(frozen=True, order=True)
class AdapterKey:
    """An adapter of a tenant."""

    tenant_id: str
    adapter_id: str


@dataclass(frozen=True, order=True)
class VersionKey:
    """A version of an adapter."""

    adapter: AdapterKey
    version: int


@dataclass(frozen=True, order=True)
class CheckpointKey:
    """A checkpoint of an adapter."""

    adapter: AdapterKey
    name: str

    @property
    def checkpoint_id(self) -> str:
        """Id of the checkpoint, `<run>/weights/<name>`."""
        return f'{self.adapter.adapter_id}/weights/{self.name}'

    @property
    def path(self) -> str:
        """Path of the checkpoint, `twinkle://<run>/weights/<name>`."""
        return PATH_SCHEME + self.checkpoint_id


def parse_checkpoint_path(tenant_id: str, path: str) -> CheckpointKey | None:
    """Return the key of a checkpoint of `tenant_id`; None if `path` is neither a checkpoint path nor an id."""
    run, separator, name = path.removeprefix(PATH_SCHEME).partition('/weights/')
    if not separator or not is_adapter_id(run) or not is_name(name):
        return None
    return CheckpointKey(AdapterKey(tenant_id, run), name)
