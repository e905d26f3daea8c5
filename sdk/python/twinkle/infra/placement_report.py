"""A text report of the devices that the program runs on."""

import os
import platform
import sys

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.runtime import runtime


def get_device_placement() -> str:
    """Return a text in a box that lists this process, its device, the ranks of the mesh, the groups and their workers.

    Raises:
        ValueError: the mesh has several ranks, and the rank of this process is not known.
    """
    current = runtime()
    mesh = current.device_mesh
    lines = [
        f'process     {os.getpid()} on {platform.system()} {platform.machine()}, Python {platform.python_version()}'
    ]
    lines.append(f'device      {_device()}')
    axes = [f'{name}={size}' for name, size in zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True)] if mesh else []
    lines.append(f'mesh        {" x ".join(axes) or "one rank"}')
    lines += _rank_lines(mesh)
    for group in current.groups:
        workers: list[str] = [] if current.cluster is None else current.cluster.groups[group.name].describe()
        lines.append(f'group       {group.name}: {_size(group)} on {group.device_type}')
        lines += [f'            {line}' for line in workers]
    width = max(len(line) for line in lines)
    rows = [f'│ {line.ljust(width)} │' for line in lines]
    return '\n'.join(['', f'╭{"─" * (width + 2)}╮', *rows, f'╰{"─" * (width + 2)}╯'])


def _rank_lines(mesh: DeviceMesh | None) -> list[str]:
    """Return a line per rank of a mesh of several ranks, with its position."""
    if mesh is None or mesh.world_size == 1:
        return []
    own = mesh.rank()
    lines: list[str] = []
    for rank in sorted(int(rank) for rank in mesh.mesh.flat):
        position = ', '.join(f'{name} {mesh.axis_rank(name, rank)}' for name in mesh.mesh_dim_names)
        lines.append(f'rank {rank:<6} {position}{" (this process)" if rank == own else ""}')
    return lines


def _size(group: DeviceGroup) -> str:
    if runtime().cluster is not None:
        return '1 worker' if group.size == 1 else f'{group.size} workers'
    return 'this process' if group.size == 1 else f"{group.size} ranks, which need mode='ray'"


def _device() -> str:
    # A program that has not imported torch can only use the CPU.
    torch = sys.modules.get('torch')
    if torch is not None and torch.cuda.is_available():
        return f'{torch.cuda.get_device_name()} (cuda), {os.cpu_count()} CPU cores'
    return f'CPU, {os.cpu_count()} cores'
