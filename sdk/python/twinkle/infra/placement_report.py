"""A text report of the devices that the program runs on."""

import os
import platform
import sys

from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.runtime import runtime


def get_device_placement() -> str:
    """Return a text in a box that lists this process, its device, the axes of the mesh and the groups."""
    current = runtime()
    mesh = current.device_mesh
    lines = [
        f'process     {os.getpid()} on {platform.system()} {platform.machine()}, Python {platform.python_version()}'
    ]
    lines.append(f'device      {_device()}')
    axes = [f'{name}={size}' for name, size in zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True)] if mesh else []
    lines.append(f'mesh        {" x ".join(axes) or "one rank"}')
    lines += [f'group       {group.name}: {_ranks(group)} on {group.device_type}' for group in current.groups]
    width = max(len(line) for line in lines)
    rows = [f'│ {line.ljust(width)} │' for line in lines]
    return '\n'.join(['', f'╭{"─" * (width + 2)}╮', *rows, f'╰{"─" * (width + 2)}╯'])


def _ranks(group: DeviceGroup) -> str:
    return 'this process' if group.size == 1 else f'{group.size} ranks, which are not supported yet'


def _device() -> str:
    # A program that has not imported torch can only use the CPU.
    torch = sys.modules.get('torch')
    if torch is not None and torch.cuda.is_available():
        return f'{torch.cuda.get_device_name()} (cuda), {os.cpu_count()} CPU cores'
    return f'CPU, {os.cpu_count()} cores'
