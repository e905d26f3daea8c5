"""Processes started by a launcher such as torchrun, and their mesh."""

import os

from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.errors import NotSupportedYet

_VARIABLES = ('RANK', 'MASTER_ADDR', 'MASTER_PORT')
"""Environment variables that torchrun sets in addition to WORLD_SIZE."""
_SUPPORTED_AXES = ('dp', 'fsdp', 'ulysses', 'tp', 'pp')
"""Axes that may have several ranks. `fsdp` and `ulysses` cannot be combined with `tp` and `pp`."""


def process_count() -> int:
    """Return the number of processes that the launcher started; 1 without a launcher.

    Raises:
        ValueError: the environment variable WORLD_SIZE is not a number.
    """
    value = os.environ.get('WORLD_SIZE', '').strip()
    if value and not value.isdigit():
        raise ValueError(f'the environment variable WORLD_SIZE must be a number of processes, got {value!r}')
    return max(int(value or 1), 1)


def is_first_rank() -> bool:
    """Return whether this process is the first or the only process of its program."""
    return process_count() == 1 or os.environ.get('RANK', '0') == '0'


def program_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh of this program's processes.

    Args:
        device_mesh: requested mesh. None: data parallel over all processes.

    Returns:
        The mesh; None for one process without a requested mesh.

    Raises:
        ValueError: the mesh does not have one rank per process, in the order of `DeviceMesh.from_sizes`; WORLD_SIZE is
            not a number; or the launcher did not set the other variables of torchrun.
        NotSupportedYet: see `check_mesh`.
    """
    count = process_count()
    if device_mesh is not None:
        check_mesh(device_mesh, count)
    missing = [name for name in _VARIABLES if count > 1 and name not in os.environ]
    if missing:
        raise ValueError(
            f'WORLD_SIZE is {count}, but {missing[0]} is not set; start the program with torchrun, or unset WORLD_SIZE '
            'to run one process'
        )
    return DeviceMesh.from_sizes(dp_size=count) if device_mesh is None and count > 1 else device_mesh


def check_mesh(mesh: DeviceMesh, count: int, *, group: str | None = None) -> None:
    """Check that a mesh has one rank for each of `count` processes, and a supported combination of axes.

    Args:
        mesh: the mesh.
        count: number of processes.
        group: name of the group that the processes belong to; None: all processes of the program.

    Raises:
        ValueError: the mesh does not have `count` ranks, or they are not in the order of `DeviceMesh.from_sizes`.
        NotSupportedYet: an axis with several ranks is not supported; `ep_size` is set and differs from `tp_size`;
            `sequence_parallel` is set without `tp` ranks; or `fsdp` or `ulysses` is combined with `tp` or `pp`.
    """
    _check_axes(mesh)
    if mesh.world_size != count and group is not None:
        raise ValueError(
            f'the mesh has {mesh.world_size} ranks ({_axes_of(mesh)}), but group {group!r} has {count}; change one of '
            'them'
        )
    if mesh.world_size != count:
        started = 'one process was' if count == 1 else f'{count} processes were'
        raise ValueError(
            f'the mesh has {mesh.world_size} ranks ({_axes_of(mesh)}), but {started} started; start the program with '
            f'`torchrun --nproc_per_node={mesh.world_size}`, or change the sizes of the mesh'
        )
    ranks = list(range(count))
    is_complete = sorted(int(rank) for rank in mesh.mesh.flat) == ranks
    # Shares of a batch are joined in the order of the ranks, and process groups sort their ranks.
    lines = [mesh.get_reading_ranks()]
    if is_complete:
        lines += [mesh.get_dim_ranks(axis, rank) for axis in mesh.mesh_dim_names for rank in ranks]
    if is_complete and mesh.ulysses_world_size > 1:
        # The ranks of each `ulysses` index form a process group. Ranks that run a pass together need the same position
        # in their groups, so the ranks of each group must ascend in data-rank order.
        by_data = sorted(ranks, key=mesh.get_data_rank_from_global_rank)
        lines += [[rank for rank in by_data if mesh.axis_rank('ulysses', rank) == index] for index in ranks]
    if not is_complete or any(line != sorted(line) for line in lines):
        raise ValueError(
            f'the mesh must contain the ranks from 0 to {count - 1} in the order of DeviceMesh.from_sizes, got '
            f'{mesh.mesh.tolist()} along {", ".join(mesh.mesh_dim_names)}; create it with that function'
        )


def _check_axes(mesh: DeviceMesh) -> None:
    experts = dict(mesh.expert_sizes)
    if experts.pop('ep', 1) not in (1, mesh.tp_world_size):
        raise NotSupportedYet('ep_size must be equal to tp_size, because tp ranks divide the experts; or leave it out')
    sizes = [*zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True), *experts.items(), ('vpp', mesh.vpp_size)]
    others = [name for name, size in sizes if size > 1 and name not in _SUPPORTED_AXES]
    if others:
        names = ', '.join(f'{name}_size' for name in _SUPPORTED_AXES)
        raise NotSupportedYet(f'{others[0]}_size is not supported yet; use {names}')
    if mesh.sequence_parallel and mesh.tp_world_size == 1:
        raise NotSupportedYet('sequence_parallel needs tp_size of at least 2; leave it out')
    alone = [axis for axis in ('fsdp', 'ulysses') if mesh.axis_size(axis) > 1]
    if alone and mesh.is_model_parallel:
        raise NotSupportedYet(f'{alone[0]}_size does not compose with tp_size and pp_size; use dp_size with them')


def _axes_of(mesh: DeviceMesh) -> str:
    sizes = zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True)
    return ' x '.join(f'{name}={size}' for name, size in sizes if size > 1) or 'all sizes are 1'
