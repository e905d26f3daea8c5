"""Meshes and groups of devices as values; nothing here touches a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

_AXES = ('pp', 'dp', 'fsdp', 'cp', 'ulysses', 'tp')
"""Axes whose sizes multiply to the world size, the slowest-varying first."""
_EXPERT_AXES = ('ep', 'etp', 'ep_fsdp')
"""Axes that divide the same ranks anew for experts."""


class MeshSizes(TypedDict, total=False):
    """Sizes of a mesh's axes; what is not given is 1."""

    world_size: int
    """Number of ranks. Unset: the product of the sizes. Given without `dp_size`, `dp` takes what is left."""
    dp_size: int
    """Data parallel replicas."""
    fsdp_size: int
    """Ranks that share one sharded copy of the model."""
    tp_size: int
    """Ranks that split each layer."""
    pp_size: int
    """Pipeline stages."""
    ulysses_size: int
    """Ranks that split attention heads of a sequence."""
    cp_size: int
    """Ranks that split a sequence's tokens."""
    ep_size: int
    """Ranks that split the experts."""
    etp_size: int
    """Ranks that split each expert."""
    ep_fsdp_size: int
    """Ranks that share one sharded copy of the experts."""


@dataclass(frozen=True)
class DeviceGroup:
    """Ranks that host the same components."""

    name: str
    ranks: int | Sequence[int]
    """A number of ranks, or the ranks themselves."""
    device_type: str = 'auto'
    """'cpu', 'cuda', 'npu', 'mps', or 'auto' for what the machine has."""
    gpus_per_worker: int = 1
    """Devices one worker sees."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks if isinstance(self.ranks, int) else len(self.ranks)


@dataclass(frozen=True, eq=False)
class DeviceMesh:
    """Ranks arranged along named axes."""

    mesh: npt.NDArray[Any]
    """int, one dimension an axis: the rank at each place."""
    mesh_dim_names: tuple[str, ...]
    """Name of each axis of `mesh`."""
    device_type: str = 'auto'
    """As `DeviceGroup.device_type`."""
    expert_sizes: tuple[tuple[str, int], ...] = ()
    """`(axis, size)` of the axes that divide the ranks anew for experts."""

    def __post_init__(self) -> None:
        """Refuse a mesh whose axes have no names, or twice the same rank.

        Raises:
            ValueError: says which.
        """
        if self.mesh.ndim != len(self.mesh_dim_names):
            raise ValueError(f'mesh has {self.mesh.ndim} axes but mesh_dim_names names {len(self.mesh_dim_names)}')
        if len(np.unique(self.mesh)) != self.mesh.size:
            raise ValueError('mesh holds a rank twice')

    @classmethod
    def from_sizes(cls, *, device_type: str = 'auto', **sizes: Unpack[MeshSizes]) -> 'DeviceMesh':
        """Arrange ranks 0, 1, ... along the axes whose sizes are given.

        Raises:
            ValueError: a size is below 1 or they do not fit `world_size`.
            TypeError: an axis is unknown.
        """
        given = {name.removesuffix('_size'): size for name, size in sizes.items()}
        unknown = sorted(set(given) - {'world', *_AXES, *_EXPERT_AXES})
        if unknown:
            raise TypeError(f'unknown mesh sizes {[f"{name}_size" for name in unknown]}')
        counts = {name: _count(name, size) for name, size in given.items()}
        names = [name for name in _AXES if name in counts] or ['dp']
        product = prod(counts.get(name, 1) for name in names)
        world_size = counts.get('world', product)
        if 'dp' not in counts and world_size % product == 0:
            names = [name for name in _AXES if name == 'dp' or name in counts]
            counts['dp'] = world_size // product
            product = world_size
        if product != world_size:
            raise ValueError(f'world_size is {world_size}, but the other sizes multiply to {product}')
        shape = [counts.get(name, 1) for name in names]
        experts = tuple((name, counts[name]) for name in _EXPERT_AXES if name in counts)
        return cls(np.arange(world_size).reshape(shape), tuple(names), device_type, experts)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self.mesh.size)

    @property
    def data_world_size(self) -> int:
        """Number of ranks that see different data: dp x fsdp."""
        return self.axis_size('dp') * self.axis_size('fsdp')

    def axis_size(self, name: str) -> int:
        """Return the size of axis `name`, 1 where the mesh does not have it."""
        return int(self.mesh.shape[self.mesh_dim_names.index(name)]) if name in self.mesh_dim_names else 1


def _count(name: str, size: object) -> int:
    if not isinstance(size, int) or size < 1:
        raise ValueError(f'{name}_size must be an integer of at least 1, got {size!r}')
    return size
