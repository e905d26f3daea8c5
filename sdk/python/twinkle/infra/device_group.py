"""Named groups of ranks, as values."""

from collections.abc import Sequence
from dataclasses import dataclass

_DEVICE_TYPES = {'auto': 'auto', 'cpu': 'cpu', 'cuda': 'cuda', 'gpu': 'cuda', 'npu': 'npu', 'mps': 'mps'}


@dataclass(frozen=True)
class DeviceGroup:
    """Ranks that host the same components.

    Raises:
        ValueError: a number is out of range, a rank is there twice, or the device type is unknown.
    """

    name: str
    ranks: int | Sequence[int]
    """A number of ranks, or the ranks themselves."""
    device_type: str = 'auto'
    """'cpu', 'cuda' (or 'GPU'), 'npu', 'mps', or 'auto' for what the machine has; kept in small letters."""
    gpus_per_worker: int = 1
    """Devices one worker sees."""
    visible_devices: str | None = None
    """Devices that workers may choose from, as `CUDA_VISIBLE_DEVICES` names them. Unset: all."""

    def __post_init__(self) -> None:
        """Check the fields."""
        device_type = _DEVICE_TYPES.get(str(self.device_type).lower())
        if device_type is None:
            raise ValueError(f'device_type must be one of {sorted(_DEVICE_TYPES)}, got {self.device_type!r}')
        object.__setattr__(self, 'device_type', device_type)
        if self.size < 1 or self.gpus_per_worker < 1:
            raise ValueError(
                f'group {self.name!r} needs at least one rank and one device a worker, '
                f'got ranks={self.ranks!r} and gpus_per_worker={self.gpus_per_worker}'
            )
        if not isinstance(self.ranks, int) and len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f'group {self.name!r} names a rank twice: {list(self.ranks)}')

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks if isinstance(self.ranks, int) else len(self.ranks)
