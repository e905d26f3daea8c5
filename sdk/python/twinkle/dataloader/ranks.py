"""Which part of each batch a rank reads."""

from dataclasses import dataclass

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


def rank_slice(mesh: DeviceMesh | None, *, rank: int | None) -> RankSlice:
    """Return the part of each batch that this process reads.

    Ranks that differ in `dp` or `fsdp` read different parts; those that differ in other axes only, the same.

    Args:
        rank: of this process in the mesh. Unset: the environment's `RANK`.

    Raises:
        ValueError: the mesh has several ranks and this process is none of them.
    """
    if mesh is None or mesh.world_size == 1:
        return RankSlice()
    data_rank = mesh.data_rank if rank is None else mesh.get_data_rank_from_global_rank(rank)
    return RankSlice(data_rank, mesh.data_world_size)
