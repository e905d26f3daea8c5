"""Which part of each batch a rank reads."""

import os
from dataclasses import dataclass

import numpy as np

from twinkle.infra import DeviceMesh


@dataclass(frozen=True)
class RankSlice:
    """One of several equal parts of each batch."""

    rank: int = 0
    """Zero-based, among those that read different data."""
    world_size: int = 1
    """Number of parts."""

    def of(self, count: int) -> range:
        """Return the places of this part in a batch of `count`; parts differ in length by at most one."""
        return range(count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size)


def rank_slice(mesh: DeviceMesh | None, *, rank: int | None, is_driver: bool) -> RankSlice:
    """Return the part of each batch that this process reads.

    Ranks that differ in `dp` or `fsdp` read different parts; those that differ in other axes only, the same.

    Args:
        rank: of this process in the mesh. Unset: the environment's `RANK`.
        is_driver: without a rank, whether this process hands whole batches to the ranks.

    Raises:
        ValueError: the mesh has several ranks and this process is none of them.
    """
    if mesh is None or mesh.world_size == 1:
        return RankSlice()
    if rank is None and is_driver:
        return RankSlice()
    known = os.environ.get('RANK') if rank is None else rank
    if known is None:
        raise ValueError(
            f'device_mesh has {mesh.world_size} ranks, and which of them this is nobody said: '
            f'start the program under torchrun, or give rank'
        )
    places = np.argwhere(mesh.mesh == int(known))
    if not len(places):
        raise ValueError(f'rank {known} is not in device_mesh, which has {mesh.world_size} ranks')
    place = dict(zip(mesh.mesh_dim_names, (int(axis) for axis in places[0]), strict=True))
    data_rank = place.get('dp', 0) * mesh.axis_size('fsdp') + place.get('fsdp', 0)
    return RankSlice(data_rank, mesh.data_world_size)
