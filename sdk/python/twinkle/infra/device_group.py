"""The `DeviceGroup` value: a named group of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

_DEVICE_TYPES = {'auto': 'auto', 'cpu': 'cpu', 'cuda': 'cuda', 'gpu': 'cuda', 'npu': 'npu', 'mps': 'mps'}
"""Stored device type, by accepted name."""


@dataclass(frozen=True)
class DeviceGroup:
    """Ranks that host the same components.

    Raises:
        ValueError: there are no ranks, a rank is listed twice, `gpus_per_worker` is below 1, or the device type is
            unknown.
    """

    name: str
    ranks: int | Sequence[int]
    """Number of ranks, or a list of rank numbers."""
    device_type: str = 'auto'
    """'cpu', 'cuda' or its synonym 'gpu', 'npu', 'mps', or 'auto' to detect the device. Case is ignored."""
    gpus_per_worker: int = 1
    """Number of GPUs of each worker in mode 'ray'; must be 1 in mode 'local'."""
    visible_devices: str | None = None
    """Devices available to the workers, in the format of `CUDA_VISIBLE_DEVICES`. None: all devices, which is the only
    value that `initialize` accepts."""

    def __post_init__(self) -> None:
        device_type = _DEVICE_TYPES.get(str(self.device_type).lower())
        if device_type is None:
            raise ValueError(f'device_type must be one of {sorted(_DEVICE_TYPES)}, got {self.device_type!r}')
        object.__setattr__(self, 'device_type', device_type)
        if self.size < 1 or self.gpus_per_worker < 1:
            raise ValueError(
                f'group {self.name!r} needs at least one rank and one device per worker, '
                f'got ranks={self.ranks!r} and gpus_per_worker={self.gpus_per_worker}'
            )
        if not isinstance(self.ranks, int) and len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f'group {self.name!r} lists a rank twice: {list(self.ranks)}')

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks if isinstance(self.ranks, int) else len(self.ranks)
