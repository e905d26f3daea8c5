"""Process groups of the ranks along the axes of a mesh."""

from collections.abc import Sequence
from typing import cast

import torch.distributed as dist

from twinkle.infra import DeviceMesh


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """Return the group of the ranks that differ from this rank only along an axis. Every rank must call this."""
    lists = {tuple(mesh.get_dim_ranks(axis, rank)): None for rank in range(mesh.world_size)}
    return _own_group([list(ranks) for ranks in lists])


def equal_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """Return the group of the ranks that have the same index along an axis as this rank. Every rank must call it."""
    indexes = [mesh.axis_rank(axis, rank) for rank in range(mesh.world_size)]
    return _own_group(
        [[rank for rank, own in enumerate(indexes) if own == index] for index in range(mesh.axis_size(axis))]
    )


def _own_group(lists: Sequence[list[int]]) -> dist.ProcessGroup:
    """Return the group of the list that contains this rank. Every rank must call it, with the same lists."""
    own, _ = dist.new_subgroups_by_enumeration(list(lists))
    return cast('dist.ProcessGroup', own)
