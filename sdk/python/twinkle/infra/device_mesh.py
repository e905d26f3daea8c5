"""Meshes and groups of devices as values; nothing here touches a device."""

import os
from dataclasses import dataclass, field
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
    vpp_size: int
    """Virtual stages that each pipeline stage runs in turn; they divide layers, not ranks."""


def _axis_rank(axis: str) -> property:
    def read(mesh: 'DeviceMesh') -> int:
        return mesh.axis_rank(axis)

    return property(read, doc=f'Place of this process along {axis!r}; 0 where the mesh does not have it.')


def _axis_size(axis: str) -> property:
    def read(mesh: 'DeviceMesh') -> int:
        return mesh.axis_size(axis)

    return property(read, doc=f'Number of ranks along {axis!r}; 1 where the mesh does not have it.')


@dataclass(frozen=True, eq=False)
class DeviceMesh:
    """Ranks arranged along named axes.

    The methods that speak of one rank take it as an argument; without it they mean this process, whose rank is the
    environment's `RANK`, or the only one of a mesh of one.

    Raises:
        ValueError: axes without names or unknown ones, a rank twice, or expert axes that do not fit.
    """

    mesh: npt.NDArray[Any]
    """int, one dimension an axis: the rank at each place. Nested lists become an array."""
    mesh_dim_names: tuple[str, ...]
    """Name of each axis of `mesh`: of 'pp', 'dp', 'fsdp', 'cp', 'ulysses', 'tp', 'ep_fsdp', 'ep', 'etp'."""
    device_type: str = 'auto'
    """As `DeviceGroup.device_type`."""
    expert_sizes: tuple[tuple[str, int], ...] = ()
    """`(axis, size)` of the axes that divide the ranks anew for experts."""
    vpp_size: int = 1
    """As `MeshSizes.vpp_size`."""
    sequence_parallel: bool = field(default=False, kw_only=True)
    """Whether the ranks of `tp` also split what lies between their layers along the sequence."""

    dp_rank, dp_world_size = _axis_rank('dp'), _axis_size('dp')
    fsdp_rank, fsdp_world_size = _axis_rank('fsdp'), _axis_size('fsdp')
    tp_rank, tp_world_size = _axis_rank('tp'), _axis_size('tp')
    pp_rank, pp_world_size = _axis_rank('pp'), _axis_size('pp')
    cp_rank, cp_world_size = _axis_rank('cp'), _axis_size('cp')
    ulysses_rank, ulysses_world_size = _axis_rank('ulysses'), _axis_size('ulysses')
    ep_rank, ep_world_size = _axis_rank('ep'), _axis_size('ep')
    etp_rank, etp_world_size = _axis_rank('etp'), _axis_size('etp')
    ep_fsdp_rank, ep_fsdp_world_size = _axis_rank('ep_fsdp'), _axis_size('ep_fsdp')

    def __post_init__(self) -> None:
        """Make an array of `mesh`, and check it."""
        object.__setattr__(self, 'mesh', np.asarray(self.mesh))
        object.__setattr__(self, 'mesh_dim_names', tuple(self.mesh_dim_names))
        if self.mesh.ndim != len(self.mesh_dim_names):
            raise ValueError(f'mesh has {self.mesh.ndim} axes but mesh_dim_names names {len(self.mesh_dim_names)}')
        known = (*_AXES, *_EXPERT_AXES)
        unknown = [name for name in self.mesh_dim_names if name not in known]
        if unknown or len(set(self.mesh_dim_names)) != len(self.mesh_dim_names):
            raise ValueError(f'mesh_dim_names must be of {known}, each once, got {self.mesh_dim_names}')
        if self.mesh.dtype.kind not in 'iu' or (self.mesh < 0).any():
            raise ValueError('mesh must hold ranks: whole numbers from 0 on')
        if len(np.unique(self.mesh)) != self.mesh.size:
            raise ValueError('mesh holds a rank twice')
        self._check_experts()

    def _check_experts(self) -> None:
        sizes = [*self.expert_sizes, ('vpp', self.vpp_size)]
        for name, size in sizes:
            _count(name, size)
        if not {name for name, _ in self.expert_sizes} <= set(_EXPERT_AXES):
            raise ValueError(f'expert_sizes must be of {_EXPERT_AXES}, got {self.expert_sizes}')
        stage_size = self.world_size // self.axis_size('pp')
        product = prod(size for _, size in self.expert_sizes)
        if stage_size % product:
            named = ', '.join(f'{name}_size {size}' for name, size in self.expert_sizes)
            raise ValueError(f'{named} must divide the {stage_size} ranks of a pipeline stage')

    @classmethod
    def from_sizes(
        cls, *, device_type: str = 'auto', sequence_parallel: bool = False, **sizes: Unpack[MeshSizes]
    ) -> 'DeviceMesh':
        """Arrange ranks 0, 1, ... along the axes whose sizes are given.

        Raises:
            ValueError: a size is below 1 or they do not fit `world_size`.
            TypeError: an axis is unknown.
        """
        # A size of None is one that is not given, as programs write it.
        given = {name.removesuffix('_size'): size for name, size in sizes.items() if size is not None}
        unknown = sorted(set(given) - {'world', 'vpp', *_AXES, *_EXPERT_AXES})
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
        experts = tuple((name, counts[name]) for name in _EXPERT_AXES if name in counts)
        ranks = np.arange(world_size).reshape([counts.get(name, 1) for name in names])
        vpp_size = counts.get('vpp', 1)
        return cls(ranks, tuple(names), device_type, experts, vpp_size, sequence_parallel=sequence_parallel)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self.mesh.size)

    @property
    def data_world_size(self) -> int:
        """Number of ranks that see different data: dp x fsdp."""
        return self.axis_size('dp') * self.axis_size('fsdp')

    @property
    def data_rank(self) -> int:
        """Which of the parts of a batch this process reads, from 0 to `data_world_size` - 1."""
        return self.get_data_rank_from_global_rank(self.rank())

    def axis_size(self, name: str) -> int:
        """Return the size of axis `name`, 1 where the mesh does not have it.

        Raises:
            ValueError: there is no such axis.
        """
        _check_axis(name)
        if name in self.mesh_dim_names:
            return int(self.mesh.shape[self.mesh_dim_names.index(name)])
        return dict(self.expert_sizes).get(name, 1)

    def rank(self) -> int:
        """Return this process's rank.

        Raises:
            ValueError: the mesh has several ranks and nobody said which this is, or it is none of them.
        """
        said = os.environ.get('RANK')
        if self.world_size == 1:
            return int(self.mesh.flat[0])
        if said is None:
            raise ValueError(
                f'device_mesh has {self.world_size} ranks, and which of them this is nobody said: '
                f'start the program under torchrun, or give rank'
            )
        return int(said)

    def axis_rank(self, name: str, rank: int | None = None) -> int:
        """Return a rank's place along axis `name`, 0 where the mesh does not have it.

        Expert axes divide the ranks of each pipeline stage anew, `etp` varying fastest, then `ep`, then `ep_fsdp`
        (Megatron-core's order of its expert groups).

        Raises:
            ValueError: the rank is not in the mesh, or there is no such axis.
        """
        _check_axis(name)
        own = self.rank() if rank is None else rank
        if name in self.mesh_dim_names or name not in _EXPERT_AXES:
            return self._place(own).get(name, 0)
        return self._expert_place(own)[name]

    def get_data_rank_from_global_rank(self, rank: int) -> int:
        """Return which of the parts of a batch a rank reads; ranks that differ in other axes only read the same.

        Raises:
            ValueError: the rank is not in the mesh.
        """
        place = self._place(rank)
        return place.get('dp', 0) * self.axis_size('fsdp') + place.get('fsdp', 0)

    def get_slice(self, total_length: int, rank: int | None = None) -> slice:
        """Return the part of a batch of `total_length` that a data rank reads.

        Parts follow each other in the order of the data ranks and differ in length by at most one.

        Args:
            total_length: examples of the batch, at least 0.
            rank: a data rank, from 0 to `data_world_size` - 1.

        Raises:
            ValueError: a number is out of range.
        """
        count, at = self.data_world_size, self.data_rank if rank is None else rank
        if total_length < 0 or not 0 <= at < count:
            raise ValueError(f'rank must be from 0 to {count - 1} and total_length from 0 on, got {at}, {total_length}')
        return slice(total_length * at // count, total_length * (at + 1) // count)

    def get_pp_stage_ranks(self, stage: int) -> list[int]:
        """Return the ranks of a pipeline stage, in the order of the mesh.

        Raises:
            ValueError: there is no such stage.
        """
        if not 0 <= stage < self.axis_size('pp'):
            raise ValueError(f'stage must be from 0 to {self.axis_size("pp") - 1}, got {stage}')
        if 'pp' not in self.mesh_dim_names:
            return [int(rank) for rank in self.mesh.flat]
        return [int(rank) for rank in self.mesh.take(stage, axis=self.mesh_dim_names.index('pp')).flat]

    def get_pp_first_ranks(self) -> list[int]:
        """Return the ranks of the first pipeline stage."""
        return self.get_pp_stage_ranks(0)

    def get_pp_last_ranks(self) -> list[int]:
        """Return the ranks of the last pipeline stage, which computes the loss."""
        return self.get_pp_stage_ranks(self.axis_size('pp') - 1)

    def get_collect_ranks(self) -> list[int]:
        """Return the ranks whose results make up a batch's: one a data rank, in order, of the last pipeline stage.

        Of the ranks that share a part of the batch it is the first along every other axis.
        """
        found: dict[int, int] = {}
        for rank in self.get_pp_last_ranks():
            found.setdefault(self.get_data_rank_from_global_rank(rank), rank)
        return [found[data_rank] for data_rank in sorted(found)]

    def get_dim_ranks(self, name: str, rank: int | None = None) -> list[int]:
        """Return the ranks that differ from a rank in axis `name` only, itself among them.

        Of the axes that divide the ranks anew for experts, the others are the other two.

        Raises:
            ValueError: the rank is not in the mesh, or there is no such axis.
        """
        _check_axis(name)
        own = self.rank() if rank is None else rank
        place = self._place(own)
        if name not in self.mesh_dim_names:
            return self._expert_ranks(name, own) if name in _EXPERT_AXES else [own]
        index = tuple(slice(None) if axis == name else place[axis] for axis in self.mesh_dim_names)
        return [int(one) for one in self.mesh[index].flat]

    def _expert_ranks(self, name: str, rank: int) -> list[int]:
        wanted = {**self._expert_place(rank), name: 0}
        stage = self.get_pp_stage_ranks(self._place(rank).get('pp', 0))
        return [one for one in stage if {**self._expert_place(one), name: 0} == wanted]

    def _expert_place(self, rank: int) -> dict[str, int]:
        """Return a rank's place along the axes that divide its stage anew, and which of their copies it is in."""
        index = self.get_pp_stage_ranks(self._place(rank).get('pp', 0)).index(rank)
        place: dict[str, int] = {}
        for axis in ('etp', 'ep', 'ep_fsdp'):
            index, place[axis] = divmod(index, self.axis_size(axis))
        return {**place, 'copy': index}

    def _place(self, rank: int) -> dict[str, int]:
        places = np.argwhere(self.mesh == rank)
        if not len(places):
            raise ValueError(f'rank {rank} is not in device_mesh, which has {self.world_size} ranks')
        return dict(zip(self.mesh_dim_names, (int(place) for place in places[0]), strict=True))


def _check_axis(name: str) -> None:
    if name not in (*_AXES, *_EXPERT_AXES):
        raise ValueError(f'there is no axis {name!r}; there are {(*_AXES, *_EXPERT_AXES)}')


def _count(name: str, size: object) -> int:
    if not isinstance(size, int) or size < 1:
        raise ValueError(f'{name}_size must be an integer of at least 1, got {size!r}')
    return size
