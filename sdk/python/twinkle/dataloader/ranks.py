"""The part of each batch that a rank reads."""

from dataclasses import dataclass

from twinkle.infra import DeviceMesh


@dataclass(frozen=True)
class RankSlice:
    """One of the parts into which each batch is divided."""

    rank: int = 0
    """Zero-based index of the part."""
    world_size: int = 1
    """Number of parts."""

    def of(self, count: int) -> range:
        """Return the positions of this part in a batch of `count` examples; part lengths differ by at most one."""
        return range(count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size)


def rank_slice(mesh: DeviceMesh | None, *, rank: int | None) -> RankSlice:
    """Return the part of each batch that this process reads.

    Ranks with different `dp` or `fsdp` coordinates read different parts; ranks that differ only in other axes read the
    same part.

    Args:
        mesh: the device mesh; None and a mesh of one rank mean that this process reads whole batches.
        rank: rank of this process in the mesh. None: the environment variable `RANK`.

    Raises:
        ValueError: the mesh has several ranks, and this process is not a rank.
    """
    if mesh is None or mesh.world_size == 1:
        return RankSlice()
    data_rank = mesh.data_rank if rank is None else mesh.get_data_rank_from_global_rank(rank)
    return RankSlice(data_rank, mesh.data_world_size)
