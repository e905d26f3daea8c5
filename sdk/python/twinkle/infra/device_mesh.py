"""The `DeviceMesh` value: ranks arranged along parallelism axes. Nothing here accesses a device."""

import os
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

_AXES = ('pp', 'dp', 'fsdp', 'cp', 'ulysses', 'tp')
"""Axes whose sizes multiply to the world size, slowest-varying first."""
_EXPERT_AXES = ('ep', 'etp', 'ep_fsdp')
"""Axes of the second layout that expert layers use over the same ranks."""


class MeshSizes(TypedDict, total=False):
    """Sizes of a mesh's axes. The default of each axis is 1."""

    world_size: int
    """Number of ranks. Unset: the product of the sizes. If set without `dp_size`, `dp` takes the remaining factor."""
    dp_size: int
    """Number of data-parallel replicas."""
    fsdp_size: int
    """Number of ranks that share one sharded copy of the model."""
    tp_size: int
    """Number of ranks that split each layer."""
    pp_size: int
    """Number of pipeline stages."""
    ulysses_size: int
    """Number of ranks that divide the tokens of each pass, and its heads in attention."""
    cp_size: int
    """Number of ranks that split the tokens of a sequence."""
    ep_size: int
    """Number of ranks that split the set of experts."""
    etp_size: int
    """Number of ranks that split each expert."""
    ep_fsdp_size: int
    """Number of ranks that share one sharded copy of the experts."""
    vpp_size: int
    """Number of virtual stages per pipeline stage. They divide layers, not ranks."""


def _axis_rank(axis: str) -> property:
    def read(mesh: 'DeviceMesh') -> int:
        return mesh.axis_rank(axis)

    return property(read, doc=f'Index of this process along {axis!r}; 0 if the mesh does not have this axis.')


def _axis_size(axis: str) -> property:
    def read(mesh: 'DeviceMesh') -> int:
        return mesh.axis_size(axis)

    return property(read, doc=f'Number of ranks along {axis!r}; 1 if the mesh does not have this axis.')


@dataclass(frozen=True, eq=False)
class DeviceMesh:
    """Ranks arranged along named axes.

    Methods that concern one rank take it as an argument. The default is this process's rank: the environment variable
    `RANK`, or the only rank of a one-rank mesh.

    Raises:
        ValueError: an axis is unnamed, unknown or named twice; a rank is negative or appears twice; a size is below 1;
            or the expert axes do not divide the ranks of a pipeline stage.
    """

    mesh: npt.NDArray[Any]
    """int, one dimension per axis: the rank at each position. Nested lists are converted to an array."""
    mesh_dim_names: tuple[str, ...]
    """Axis names of `mesh`, from 'pp', 'dp', 'fsdp', 'cp', 'ulysses', 'tp', 'ep_fsdp', 'ep' and 'etp'."""
    device_type: str = 'auto'
    """See `DeviceGroup.device_type`."""
    expert_sizes: tuple[tuple[str, int], ...] = ()
    """`(axis, size)` of each expert axis."""
    vpp_size: int = 1
    """See `MeshSizes.vpp_size`."""
    sequence_parallel: bool = field(default=False, kw_only=True)
    """Whether `tp` ranks also split the activations between layers along the sequence."""

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
        object.__setattr__(self, 'mesh', np.asarray(self.mesh))
        object.__setattr__(self, 'mesh_dim_names', tuple(self.mesh_dim_names))
        if self.mesh.ndim != len(self.mesh_dim_names):
            raise ValueError(f'mesh has {self.mesh.ndim} axes but mesh_dim_names names {len(self.mesh_dim_names)}')
        known = (*_AXES, *_EXPERT_AXES)
        unknown = [name for name in self.mesh_dim_names if name not in known]
        if unknown or len(set(self.mesh_dim_names)) != len(self.mesh_dim_names):
            raise ValueError(f'mesh_dim_names must be distinct names from {known}, got {self.mesh_dim_names}')
        if self.mesh.dtype.kind not in 'iu' or (self.mesh < 0).any():
            raise ValueError('mesh must contain ranks: integers of at least 0')
        if len(np.unique(self.mesh)) != self.mesh.size:
            raise ValueError(f'mesh contains a rank twice: {self.mesh.tolist()}; list each rank once')
        self._check_experts()

    def _check_experts(self) -> None:
        sizes = [*self.expert_sizes, ('vpp', self.vpp_size)]
        for name, size in sizes:
            _count(name, size)
        if not {name for name, _ in self.expert_sizes} <= set(_EXPERT_AXES):
            raise ValueError(f'the axes of expert_sizes must be from {_EXPERT_AXES}, got {self.expert_sizes}')
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
            ValueError: a size is not an integer of at least 1, the sizes do not multiply to `world_size`, or the expert
                sizes do not divide the ranks of a pipeline stage.
            TypeError: an axis is unknown.
        """
        # Programs may pass None for an unset size.
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
    def is_model_parallel(self) -> bool:
        """Whether the axis `tp` or `pp` has several ranks."""
        return self.axis_size('tp') > 1 or self.axis_size('pp') > 1

    @property
    def data_world_size(self) -> int:
        """Number of ranks that read different data: dp x fsdp."""
        return self.axis_size('dp') * self.axis_size('fsdp')

    @property
    def data_rank(self) -> int:
        """Index of the batch part that this process reads, from 0 to `data_world_size` - 1."""
        return self.get_data_rank_from_global_rank(self.rank())

    def axis_size(self, name: str) -> int:
        """Return the size of axis `name`, or 1 if the mesh does not have the axis.

        Raises:
            ValueError: `name` is not a known axis.
        """
        _check_axis(name)
        if name in self.mesh_dim_names:
            return int(self.mesh.shape[self.mesh_dim_names.index(name)])
        return dict(self.expert_sizes).get(name, 1)

    def rank(self) -> int:
        """Return this process's rank.

        Raises:
            ValueError: the mesh has several ranks and `RANK` is unset or not an integer.
        """
        value = os.environ.get('RANK')
        if self.world_size == 1:
            return int(self.mesh.flat[0])
        if value is None:
            raise ValueError(
                f'device_mesh has {self.world_size} ranks, and the rank of this process is not known: '
                f'start the program under torchrun, or pass rank'
            )
        return int(value)

    def axis_rank(self, name: str, rank: int | None = None) -> int:
        """Return a rank's index along axis `name`, or 0 if the mesh does not have the axis.

        Expert axes form a second layout of each pipeline stage's ranks: `etp` varies fastest, then `ep`, then
        `ep_fsdp`, which is the order of Megatron-core's expert groups.

        Raises:
            ValueError: the rank is not in the mesh, or `name` is not a known axis.
        """
        _check_axis(name)
        rank = self.rank() if rank is None else rank
        if name in self.mesh_dim_names or name not in _EXPERT_AXES:
            return self._coordinates(rank).get(name, 0)
        return self._expert_coordinates(rank)[name]

    def get_data_rank_from_global_rank(self, rank: int) -> int:
        """Return the index of the batch part that a rank reads.

        Ranks that differ only in axes other than `dp` and `fsdp` read the same part.

        Raises:
            ValueError: the rank is not in the mesh.
        """
        coordinates = self._coordinates(rank)
        return coordinates.get('dp', 0) * self.axis_size('fsdp') + coordinates.get('fsdp', 0)

    def get_slice(self, total_length: int, rank: int | None = None) -> slice:
        """Return the slice of a batch that a data rank reads.

        Slices are consecutive in data-rank order, and their lengths differ by at most one.

        Args:
            total_length: number of examples in the batch, at least 0.
            rank: data rank, from 0 to `data_world_size` - 1. None: this process's data rank.

        Raises:
            ValueError: `total_length` is negative, or `rank` is out of range or unknown.
        """
        count, at = self.data_world_size, self.data_rank if rank is None else rank
        if total_length < 0 or not 0 <= at < count:
            raise ValueError(f'rank must be from 0 to {count - 1} and total_length >= 0, got {at}, {total_length}')
        return slice(total_length * at // count, total_length * (at + 1) // count)

    def get_pp_stage_ranks(self, stage: int) -> list[int]:
        """Return the ranks of a pipeline stage, in mesh order.

        Raises:
            ValueError: `stage` is out of range.
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
        """Return the ranks of the last pipeline stage."""
        return self.get_pp_stage_ranks(self.axis_size('pp') - 1)

    def get_collect_ranks(self) -> list[int]:
        """Return the ranks whose results together form a batch's result, in data-rank order.

        Each data rank is represented by its first rank in the last pipeline stage.
        """
        found: dict[int, int] = {}
        for rank in self.get_pp_last_ranks():
            found.setdefault(self.get_data_rank_from_global_rank(rank), rank)
        return [found[data_rank] for data_rank in sorted(found)]

    def get_reading_ranks(self) -> list[int]:
        """Return the ranks whose shares together form a batch, in data-rank order.

        Each data rank is represented by its lowest rank.
        """
        found: dict[int, int] = {}
        for rank in sorted(int(rank) for rank in self.mesh.flat):
            found.setdefault(self.get_data_rank_from_global_rank(rank), rank)
        return [found[data_rank] for data_rank in sorted(found)]

    def get_dim_ranks(self, name: str, rank: int | None = None) -> list[int]:
        """Return the ranks that differ from `rank` only along axis `name`, including `rank` itself.

        Along an expert axis, the ranks are those of the same pipeline stage that differ only in this axis of the
        expert layout.

        Raises:
            ValueError: the rank is not in the mesh, or `name` is not a known axis.
        """
        _check_axis(name)
        rank = self.rank() if rank is None else rank
        coordinates = self._coordinates(rank)
        if name not in self.mesh_dim_names:
            return self._expert_ranks(name, rank) if name in _EXPERT_AXES else [rank]
        index = tuple(slice(None) if axis == name else coordinates[axis] for axis in self.mesh_dim_names)
        return [int(other) for other in self.mesh[index].flat]

    def _expert_ranks(self, name: str, rank: int) -> list[int]:
        wanted = {**self._expert_coordinates(rank), name: 0}
        stage = self.get_pp_stage_ranks(self._coordinates(rank).get('pp', 0))
        return [other for other in stage if {**self._expert_coordinates(other), name: 0} == wanted]

    def _expert_coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's indices in its stage's expert layout; `copy` numbers the repetitions of that layout."""
        index = self.get_pp_stage_ranks(self._coordinates(rank).get('pp', 0)).index(rank)
        coordinates: dict[str, int] = {}
        for axis in ('etp', 'ep', 'ep_fsdp'):
            index, coordinates[axis] = divmod(index, self.axis_size(axis))
        return {**coordinates, 'copy': index}

    def _coordinates(self, rank: int) -> dict[str, int]:
        found = np.argwhere(self.mesh == rank)
        if not len(found):
            raise ValueError(f'rank {rank} is not in device_mesh, which has {self.world_size} ranks')
        return dict(zip(self.mesh_dim_names, (int(index) for index in found[0]), strict=True))


def _check_axis(name: str) -> None:
    if name not in (*_AXES, *_EXPERT_AXES):
        raise ValueError(f'unknown axis {name!r}; known axes are {(*_AXES, *_EXPERT_AXES)}')


def _count(name: str, size: object) -> int:
    if not isinstance(size, int) or size < 1:
        raise ValueError(f'{name}_size must be an integer of at least 1, got {size!r}')
    return size
